"""What every operation gives for fixed inputs, in any form: what `errors.py` compares.

Imports Triton. Shapes and letters as in the operations themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import liger
import torch
from cases import exit_check
from torch import Tensor

from exitserve_kernels.exit_check import CRITERIA
from exitserve_kernels.logit_losses import logit_losses
from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary, fill

TYPES = (torch.float32, torch.bfloat16, torch.float16)
Cast = Callable[[Tensor], Tensor]
"""Moves a float32 tensor of inputs to where, and in which type, an operation takes it."""
Results = Callable[[Any, Cast], dict[str, Tensor]]
"""Results by name, of a form: `triton`, `torch`, or `liger` for what that has of them."""


class OperationRun(NamedTuple):
    """An operation with inputs of one type."""

    operation: str
    dtype: torch.dtype
    results: Results
    in_liger: bool
    """Whether Liger-Kernel has any, and runs here."""


def runs(interpreted: bool) -> Iterator[OperationRun]:
    """Every operation with every type. Triton's interpreter cannot run Liger-Kernel's norm."""
    operations: list[tuple[str, Results, bool]] = [
        ("exit_check", _exit_check, True),
        ("propagate_kv", _propagate_kv, not interpreted),
        ("logit_losses", _logit_losses, False),
    ]
    for name, results, in_liger in operations:
        for dtype in TYPES:
            yield OperationRun(name, dtype, results, in_liger)
    for kept in (torch.float8_e4m3fn, torch.float8_e5m2):
        name = f"propagate_kv, {str(kept).removeprefix('torch.')}"
        yield OperationRun(name, torch.bfloat16, partial(_propagate_kv, kept=kept), in_liger=False)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _exit_check(form: Any, cast: Cast) -> dict[str, Tensor]:
    """33 rows of 256; a head [1000, 256] that gives logits of standard deviation 3."""
    rows, weight = cast(_random(33, 256)), cast(_random(1000, 256, seed=1) * 3 / 16)
    check: Any = partial(exit_check, rows, weight)
    if form == "liger":
        tokens = check(implementation="torch").token
        _, logarithms = liger.top_and_log_probability(rows, weight, tokens)
        return {"confidence, max_prob": logarithms.exp()}
    checks = {name: check(criterion=name, implementation=form) for name in CRITERIA}
    found = {f"confidence, {name}": own.confidence for name, own in checks.items()}
    own = checks["max_prob"]
    return {"log_sum_exp": own.top + own.total.log(), **found}


def _propagate_kv(form: Any, cast: Cast, *, kept: torch.dtype | None = None) -> dict[str, Tensor]:
    """33 rows, 3 layers, 2 heads of 64, key norm and rotary, blocks of 4; what the slots hold.

    `kept` is the type of a cache of 8 bits; the truth's is float64 nevertheless.
    """
    layers, heads, size, rows = 3, 2, 64, 33
    projected = cast(_random(rows, layers, 2, heads * size))
    device, dtype = projected.device, projected.dtype
    if kept is not None and dtype != torch.float64:
        dtype = kept
    whole = torch.zeros(2, layers, 12, 4, heads, size, device=device).to(dtype)
    scales = None if kept is None else torch.linspace(0.5, 2.0, layers, device=device)
    scales = None if scales is None else scales[:, None].repeat(1, heads)
    caches = Caches(list(whole[0]), list(whole[1]), scales, scales)
    key_norm = KeyNorm(cast(_random(layers, size, seed=1).abs() + 0.5), 1e-6)
    angles = _random(50, size // 2, seed=2) * 3
    rotary = Rotary([cast(torch.cat([angles.cos(), angles.sin()], dim=-1))] * layers)
    positions = torch.arange(rows, device=device)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:rows].to(device)
    given = (projected, positions, slots, caches)
    if form == "liger":
        liger.fill(*given, key_norm, rotary)
    else:
        fill(*given, key_norm=key_norm, rotary=rotary, implementation=form)
    keys, values = whole.double().flatten(2, 3)[:, :, slots]
    return {"keys": keys, "values": values}


def _logit_losses(form: Any, cast: Cast) -> dict[str, Tensor]:
    """33 tokens, 5000 logits of standard deviation 4, a teacher 2 beside them; all weights 1."""
    logits = cast(4.0 * _random(33, 5000))
    teacher = cast(4.0 * _random(33, 5000) + 2.0 * _random(33, 5000, seed=1))
    labels = torch.arange(33, device=logits.device)
    scale = torch.ones(33, device=logits.device)
    losses = logit_losses(logits, labels, scale, teacher, scale, implementation=form)
    named = zip(("cross-entropy", "divergence"), losses, strict=True)
    return {name: one for name, one in named if one is not None} | {"gradient": logits}
