"""vLLM's runner V2, which GPUs run, on the CPU: its Triton kernels in Triton's interpreter.

vLLM lets its CPU worker run V2 where Triton has a backend for CPUs, and `site/sitecustomize.py`
names one. Slow, and everything is real: the scheduler a pass ahead, the speculator, rejection
sampling, block tables. CUDA graphs are what is missing.
"""

import importlib
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SITE = Path(__file__).parent / "site"

if INTERPRETED:  # before vLLM is imported, which looks once
    runpy.run_path(str(SITE / "sitecustomize.py"))


@pytest.fixture(autouse=True)
def on_runner_v2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that start here run V2, in this process or in others."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1, as in `make test`")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    yield
    # An engine keeps its process's variables for those that start there later.
    importlib.import_module("vllm.envs").disable_envs_cache()
