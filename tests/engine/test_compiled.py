"""The exit check that vLLM compiles: with its own decorator, and a real compiler."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from exitserve_kernels.exit_check import CRITERIA, Criterion, check_logits


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's, as `exitserve.engine.launch.prepare_environment` has it compile on a CPU."""
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    found = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))
    with set_current_vllm_config(found), torch.inference_mode():
        yield found


@pytest.mark.parametrize("criterion", CRITERIA)
def test_exit_checks_read_the_same(config: Any, criterion: Criterion) -> None:
    """Also where logits tie, which those of bfloat16 often do, or cannot be read."""
    from vllm.forward_context import set_forward_context

    from exitserve.engine.compat.compiled import compiled_module
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
