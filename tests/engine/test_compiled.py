"""Modules that vLLM compiles, called directly: with its own decorator, and a real compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exitserve_kernels.exit_check import CRITERIA, Criterion, check_logits

WIDTH = 4


class Layers(nn.Module):
    """Gives several results, one of which is None, as the engine's segments do."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, None, Tensor]:
        z = self.first(x)
        total = self.second(z) * x.shape[0]
        return total if y is None else total + y, None, z


class Returned(nn.Module):
    """Gives back what it was given, which is none of its graph's results."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), y


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's, as `exitserve.engine.launch.prepare_environment` has it compile on a CPU."""
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        VllmConfig,
        set_current_vllm_config,
    )

    found = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))
    with set_current_vllm_config(found), torch.inference_mode():
        yield found


def _made(kind: Any, config: Any) -> Any:
    from exitserve.engine.compat.compiled import compiled_module

    return compiled_module(config, kind.__name__, kind, kind.forward, ["x", "y"])


def _check(module: Any, kind: Any, config: Any, *lengths: int) -> None:
    """Calls a module; compares it with its forward, not compiled."""
    from vllm.forward_context import set_forward_context

    for length in lengths:
        x, y = torch.randn(length, WIDTH), torch.randn(length, WIDTH)
        with set_forward_context(None, config):
            found = module(x, y)
        expected = kind.forward(module, x, y)
        assert [one is None for one in found] == [one is None for one in expected]
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other)


def test_the_graph_is_called_directly(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from exitserve.engine.compat.compiled import call_directly

    module = _made(Layers, config)
    (calls,) = call_directly([nn.Linear(1, 1), module])
    assert isinstance(module, Layers)
    _check(module, Layers, config, 6, 5, 5, 3)  # compiles, then two that differ

    def no_more(*_: Any) -> Any:
        raise AssertionError("the weights are gathered again")

    with monkeypatch.context() as patched:
        patched.setattr(calls, "_compiled", no_more)
        _check(module, Layers, config, 1, 7, 3)

    module.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # another object
    calls.forget()
    _check(module, Layers, config, 3, 1, 2)


def test_what_is_unclear_is_left_to_vllm(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from exitserve.engine.compat.compiled import call_directly

    module = _made(Returned, config)
    (calls,) = call_directly([module])
    made: list[int] = []
    compiled = calls._compiled

    def counted(x: Tensor, y: Tensor) -> Any:
        made.append(len(x))
        return compiled(x, y)

    monkeypatch.setattr(calls, "_compiled", counted)
    _check(module, Returned, config, 6, 5, 4, 3)
    assert made == [6, 5, 4, 3]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_exit_checks_read_the_same(config: Any, criterion: Criterion) -> None:
    """Also where logits tie, which those of bfloat16 often do, or cannot be read."""
    from vllm.forward_context import set_forward_context

    from exitserve.engine.compat.compiled import call_directly, compiled_module
    from exitserve.engine.layers.exit_head import HeadReading

    module = compiled_module(
        config,
        f"head_reading_{criterion}",
        HeadReading,
        HeadReading.forward,
        ["normed"],
        compute_logits=lambda normed: normed * 2.0,
        criterion=criterion,
    )
    (calls,) = call_directly([module])
    for rows, odd in ((5, torch.nan), (1, -torch.inf), (3, torch.inf), (2, -torch.inf)):
        normed = torch.randint(-6, 6, (rows, 300)).bfloat16()
        normed[0, 7] = odd
        with set_forward_context(None, config):
            logits, read = module(normed)
        torch.testing.assert_close(logits, normed * 2.0, rtol=0.0, atol=0.0, equal_nan=True)
        whole = check_logits(logits, torch.zeros(rows), criterion=criterion).confidence
        # Float32 sums of 300 numbers in another order.
        close = {"atol": 1e-6, "rtol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(read[1].float(), whole, **close)
        sound = slice(0 if odd == -torch.inf else 1, None)
        assert read[0][sound].tolist() == logits.float().argmax(dim=-1)[sound].tolist()
    assert calls._plan is not None, "vLLM's wrapper is not passed by"
