"""vLLM's runner V2, which GPUs run, on the CPU: its Triton kernels in Triton's interpreter.

vLLM lets its CPU worker run V2 where Triton has a backend for CPUs. Here one is named that only
has to look active, since the interpreter runs every kernel. Slow, and everything is real: the
scheduler a pass ahead, the speculator, rejection sampling, block tables.

Only passes without CUDA graphs: see `docs/gpu.md` for what that leaves unproved.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.backends import backends

    # Before vLLM is imported, which looks for it once (`vllm/triton_utils/importing.py`).
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


@pytest.fixture(autouse=True)
def on_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start here run V2."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1, as in `make test`")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
