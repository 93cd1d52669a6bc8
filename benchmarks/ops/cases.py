"""What `run.py` times: every operation at the sizes of a large model, or at sizes for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import liger
import torch
from timing import FUSED, TimedCase, Work
from torch import Tensor

from exitserve_kernels.dispatch import Asked, can_run_triton
from exitserve_kernels.exit_check import (
    Criterion,
    ExitCheck,
    Head,
    finish,
    summarise_slice,
)
from exitserve_kernels.logit_losses import logit_losses
from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary, fill

BATCHES = (1, 8, 32, 128, 512)


def all_cases(device: torch.device, small: bool) -> Iterator[TimedCase]:
    """One after the other, so that few tensors exist at a time; `small`: sizes for a CPU."""
    yield from _exit_checks(device, small)
    yield from _fills(device, small)
    for vocabulary in (4096,) if small else (49_152, 128_256):
        yield from _logit_losses(device, vocabulary, 16 if small else 2048)


def _forms(work: Callable[..., Any], device: torch.device) -> dict[str, Work]:
    """Work that takes an `implementation`, by form."""
    fused = device.type == "cuda" and can_run_triton(device)
    forms = {FUSED: "triton", "PyTorch": "torch"} if fused else {"PyTorch": "torch"}
    return {name: partial(work, implementation=form) for name, form in forms.items()}


def _has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and bool(liger.versions())


def _rows(count: int) -> str:
    return f"{count} row" + ("s" if count > 1 else "")


def exit_check(
    rows: Tensor,
    weight: Tensor,
    criterion: Criterion = "max_prob",
    implementation: Asked = "auto",
) -> ExitCheck:
    """Both steps of a check, of rows [B, D] with a head [V, D], at a threshold of 0.5."""
    return finish(
        summarise_slice(rows, Head(weight), implementation=implementation)[:, None],
        torch.full((len(rows),), 0.5, device=rows.device),
        criterion=criterion,
        vocab_size=len(weight),
        implementation=implementation,
    )


def _exit_checks(device: torch.device, small: bool) -> Iterator[TimedCase]:
    """Llama 3 8B's head."""
    vocabulary, width = (4096, 256) if small else (128_256, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype)
    for rows in BATCHES[: 2 if small else None]:
        states = torch.randn(rows, width, device=device, dtype=dtype)
        check = partial(exit_check, states, weight)
        forms = _forms(check, device)
        if _has_liger(device):
            tokens = check().token
            forms["Liger"] = partial(liger.top_and_log_probability, states, weight, tokens)
        yield TimedCase("exit_check", _rows(rows), forms, weight.numel() * weight.element_size())


def _fills(device: torch.device, small: bool) -> Iterator[TimedCase]:
    """24 layers above an exit, 8 kv heads of 128, key norm and rotary, blocks of 16."""
    layers, heads, size, blocks = (3, 2, 16, 64) if small else (24, 8, 128, 2048)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    whole = [
        torch.zeros(blocks, heads, 16, 2 * size, device=device, dtype=dtype) for _ in range(layers)
    ]
    views = [cache.transpose(1, 2).chunk(2, dim=-1) for cache in whole]
    caches = Caches([view[0] for view in views], [view[1] for view in views])
    table = torch.randn(8192, size, device=device, dtype=dtype)
    key_norm = KeyNorm(torch.ones(layers, size, device=device, dtype=dtype), 1e-6)
    rotary = Rotary([table] * layers)
    for rows in BATCHES[: 2 if small else None]:
        projected = torch.randn(rows, layers, 2, heads * size, device=device, dtype=dtype)
        positions = torch.randint(0, 8192, (rows,), device=device)
        slots = torch.randperm(blocks * 16, device=device)[:rows]
        given = (projected, positions, slots, caches)
        forms = _forms(partial(fill, *given, key_norm=key_norm, rotary=rotary), device)
        if _has_liger(device):
            forms["Liger"] = partial(liger.fill, *given, key_norm, rotary)
        yield TimedCase("propagate_kv", _rows(rows), forms)


def _logit_losses(device: torch.device, vocabulary: int, rows: int) -> Iterator[TimedCase]:
    """A training step's chunk, the vocabularies of SmolLM2 and Llama 3: losses and gradient."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    logits, teacher = torch.randn(2, rows, vocabulary, device=device, dtype=dtype)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    scale = torch.ones(rows, device=device)
    for name, taught in (("labels", None), ("labels and teacher", teacher)):
        given = (logits, labels, scale, taught, scale)
        forms = _forms(partial(logit_losses, *given), device)
        if _has_liger(device):
            forms["Liger"] = partial(liger.logit_losses, logits, labels, taught)
        moved = logits.nbytes * (2 if taught is None else 3)
        yield TimedCase("logit_losses", f"{rows} x {vocabulary}, {name}", forms, moved)
