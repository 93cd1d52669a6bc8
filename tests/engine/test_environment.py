"""What starting an engine sets in the environment, where the user has not; and its end."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from exitserve.engine.launch import (
    engine_options,
    executor_options,
    laid_over,
    prepare_environment,
    stop_engine,
    suit_runner,
)
from exitserve.errors import ExitServeError


def test_what_is_not_set_is_set(monkeypatch) -> None:
    for name in ("VLLM_USE_AOT_COMPILE", "VLLM_PLUGINS", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    prepare_environment()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        assert os.environ["VLLM_USE_AOT_COMPILE"] == "0"
    assert os.environ["VLLM_PLUGINS"] == "exitserve"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_what_is_set_stays(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    prepare_environment()
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"
    assert os.environ["VLLM_PLUGINS"] == "mine,exitserve"


def test_a_gpu_is_told_to_be_experimental(monkeypatch, capsys, make_checkpoint) -> None:
    from vllm.platforms import current_platform

    model = make_checkpoint("llama")
    options = engine_options(model, {})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    suit_runner(options, model)
    assert "experimental" not in capsys.readouterr().err, "on a CPU"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    suit_runner(options, model)
    assert "experimental" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpus", "given", "bound", "ours"),
    [
        (2, {}, None, True),
        (4, {"tensor_parallel_size": 1, "data_parallel_size": None}, "nobind", True),
        (5, {}, None, False),
        (2, {"tensor_parallel_size": 2}, None, False),
        (2, {"distributed_executor_backend": "mp"}, None, False),
        (2, {}, "0", False),
    ],
)
def test_a_lone_worker_of_few_cpus_runs_in_its_engine(
    monkeypatch, cpus: int, given: dict[str, Any], bound: str | None, ours: bool
) -> None:
    monkeypatch.setattr("vllm.utils.torch_utils.available_cpu_count", lambda: cpus)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if bound is not None:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    assert bool(executor_options(given)) == ours


def test_arguments_of_a_user_are_joined_with_ours() -> None:
    ours = {"logits_processors": ["ours"], "hf_overrides": {"a": 1, "b": 1}, "scheduler_cls": "x"}
    given = {"logits_processors": ["theirs"], "hf_overrides": {"b": 2}, "dtype": "float32"}
    assert laid_over(ours, given) == {
        "logits_processors": ["theirs", "ours"],
        "hf_overrides": {"a": 1, "b": 2},
        "scheduler_cls": "x",
        "dtype": "float32",
    }


def test_kernels_that_cannot_run_here_are_refused_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setenv("EXITSERVE_KERNELS", "fast")
    with pytest.raises(ExitServeError, match="EXITSERVE_KERNELS 'fast' is unknown; allowed: auto"):
        prepare_environment()


def test_a_process_that_ends_before_it_is_killed_is_no_error() -> None:
    def shutdown() -> None:
        raise psutil.NoSuchProcess(4711)

    core = SimpleNamespace(shutdown=shutdown)
    stop_engine(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))


CPU_ALONE = ("exitserve.engine.hooks.cpu_worker", "exitserve.engine.drafting.cpu")
IMPORTS = f"""
import importlib, pkgutil, sys
import exitserve.engine
for one in pkgutil.walk_packages(exitserve.engine.__path__, "exitserve.engine."):
    if one.name not in {CPU_ALONE!r}:
        importlib.import_module(one.name)
found = [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
sys.exit(f"imported: {{found}}" if found else 0)
"""


def test_a_card_is_served_without_the_cpus_stand_ins() -> None:
    """vLLM's CPU worker replaces `torch.cuda`'s events and streams by stand-ins that do nothing."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
