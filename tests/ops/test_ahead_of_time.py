"""Every kernel compiles for every target, without a GPU, and spills no more than is accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ops" / "ahead_of_time.py"


AT_NIGHT = [pytest.param(arch, marks=pytest.mark.nightly) for arch in (90, 100)]


@pytest.mark.parametrize("arch", [80, *AT_NIGHT])
def test_kernels_compile_ahead_of_time(arch: int) -> None:
    # A process of its own: Triton compiles nothing once it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), "--arch", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    needs = json.loads(done.stdout)
    assert any(name.startswith("exit_check") for name in needs)
    # What a program may have of shared memory on an L4 or an RTX 4090, the smallest.
    assert all(n["shared"] <= 99 * 1024 for one in needs.values() for n in one.values())
