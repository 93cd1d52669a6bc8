"""vLLM's runner V2, which GPUs run, on the CPU: its Triton kernels in Triton's interpreter.

vLLM lets its CPU worker run V2 where Triton has a backend for CPUs, and `site/sitecustomize.py`
names one. Slow, and everything is real: the scheduler a pass ahead, the speculator, rejection
sampling, block tables. CUDA graphs are what is missing.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SITE = Path(__file__).parent / "site"

if INTERPRETED:  # before vLLM is imported, which looks once
    runpy.run_path(str(SITE / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def on_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start here run V2, in this process or in others."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1, as in `make test`")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)


LAYER = 2
"""Of 6: where the tiny checkpoints draft."""
KINDS: dict[str, dict[str, Any]] = {
    "verify": {"exit_mode": "verify", "exit_threshold": 0.1},
    "defer": {"exit_mode": "defer", "exit_threshold": 0.08},
    "off": {"exit_mode": "off"},
    "daring": {"exit_mode": "defer", "exit_threshold": 0.04},
}
"""Fields of requests that a server which drafts takes."""


@pytest.fixture(scope="session")
def drafting() -> dict[str, Any]:
    """Options of engines that draft three tokens a step, prompts of more than 64 in chunks."""
    exits = {"mode": "verify", "exit_threshold": 0.1, "exit_layers": [LAYER], "num_drafts": 3}
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return {"exits": exits, "enable_prefix_caching": False, **sizes}


@pytest.fixture(scope="session")
def asking(job: Any) -> Callable[..., list[Any]]:
    """`asking(jobs, "defer")`: the jobs, of one of `KINDS`, or of all in turn."""

    def asking(jobs: Sequence[Any], kind: str | None = None) -> list[Any]:
        names = list(KINDS) if kind is None else [kind]
        return [
            job(one.prompt, KINDS[names[index % len(names)]], one.max_tokens)
            for index, one in enumerate(jobs)
        ]

    return asking


@pytest.fixture(scope="session")
def model(make_checkpoint: Any) -> Path:
    """A checkpoint with one exit."""
    found: Path = make_checkpoint("llama", exits=(LAYER,))
    return found


@pytest.fixture(scope="session")
def expected(expect: Any) -> Callable[..., list[Any]]:
    """`expected(model, jobs)`: the oracle's tokens and depths, where every check is made.

    In mode "verify" they are full depth's.
    """

    def expected(model: Path, jobs: Sequence[Any]) -> list[Any]:
        from exitserve.reference import load_reference

        reference = load_reference(str(model), exit_checks="all")
        asked = [
            one if one.fields["exit_mode"] == "defer" else type(one)(one.prompt, {}, one.max_tokens)
            for one in jobs
        ]
        return [expect(reference, one) for one in asked]

    return expected


@pytest.fixture(autouse=True)
def masks_are_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter stores under a mask of bits only; grammars make one of 0 and 1."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def create_masked_store(builder: Any, places: Any, values: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(builder, places, values, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
