"""What commands do on a GPU, whose memory and name are played; nothing is started."""

from __future__ import annotations

import argparse
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig
from vllm.platforms import current_platform
from vllm.v1.worker.utils import request_memory

from exitserve.bench import engines, run
from exitserve.bench.command import add_command, job_of
from exitserve.bench.engines import _arguments, engine_names
from exitserve.bench.settings import GPU_SHARE, BenchJob
from exitserve.engine.launch import engine_options, suit_runner
from exitserve.errors import ExitServeError

GIB = 2**30
# SmolLM2-135M's.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "multi_exit": {"version": 1, "exit_layers": [6, 12, 20]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialised() -> None:
        raise AssertionError("CUDA is initialised in a process that starts engines")

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    played = {"is_cpu": False, "get_device_name": "NVIDIA H200"}
    for name, value in (played | {"get_device_total_memory": 140 * GIB}).items():
        monkeypatch.setattr(type(current_platform), name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialised)


def job(model: Path, *arguments: object) -> BenchJob:
    prompts = model / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    given = [model, "--prompts", prompts, "--out", "unused", *arguments]
    return job_of(parser.parse_args(["bench", *map(str, given)]))


def start(total: int, asked: list[float]) -> None:
    """Starts engines on a card, as far as vLLM looks at its memory; each takes what it asked for,
    and CUDA a little more."""
    free = total
    for share in asked:
        free -= GIB // 2
        seen = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
        free -= request_memory(seen, CacheConfig(gpu_memory_utilization=share))


def test_engines_together_ask_for_no_more_than_there_is(model: Path, gpu: None) -> None:
    three = job(model, "--thresholds", 0.5, "--modes", "confidence,verify")
    assert engine_names(three) == ("plain", "exits", "drafting")
    share = _arguments(three).get("gpu_memory_utilization", GPU_SHARE)
    start(140 * GIB, [share] * 3)
    assert 3 * share > 0.9, "what there is, is used"
    with pytest.raises(ValueError, match="Free memory"):
        start(140 * GIB, [GPU_SHARE] * 3)
    assert CacheConfig().gpu_memory_utilization == GPU_SHARE


def test_too_little_memory_is_told_before_anything_starts(
    model: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: 8 * GIB)
    _arguments(job(model))
    few = job(model, "--rivals", "ngram", "--modes", "confidence,verify")
    with pytest.raises(ExitServeError, match=r"4 engines share 0.92 of the GPU's 8.0 GiB, 1.4 GiB"):
        _arguments(few)
    with pytest.raises(ExitServeError, match="on its runner V1 alone"):
        _arguments(replace(few, rivals=("suffix",)))
    with pytest.raises(ExitServeError, match=r"at most 1, not 1\.5"):
        job(model, "--gpu-memory-utilization", 1.5)


def test_engines_start_at_the_same_time(
    model: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the others; if one fails, those that did start are stopped."""
    work, stopped = job(model, "--modes", "confidence,verify"), list[str]()
    together = threading.Barrier(3, timeout=30)

    def started(name: str, *_: object) -> str:
        together.wait()
        if name == "exits":
            raise ExitServeError("this one fails")
        return name

    monkeypatch.setattr(engines, "_start", started)
    monkeypatch.setattr(engines, "stop_engine", stopped.append)
    with pytest.raises(ExitServeError, match="this one fails"), engines.running_engines(work):
        raise AssertionError
    assert {*stopped} == {"plain", "drafting"}


def test_interrupted_a_comparison_keeps_the_batch_sizes_that_are_complete(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(size: int, *_: object) -> list[int]:
        if size in missing:
            raise KeyboardInterrupt
        return [size]

    monkeypatch.setattr(run, "_measure_batches_of", interrupted)
    work, told = job(model, "--batch-sizes", "1,8,32"), list[str]()
    missing = {32}
    found = run._measure(work, None, lambda doing, _: told.append(doing))  # type: ignore[arg-type]
    assert found == [1, 8]
    assert told == ["interrupted: without batch 32"]
    missing = {1}
    with pytest.raises(KeyboardInterrupt):
        run._measure(work, None, lambda *_: None)  # type: ignore[arg-type]


def test_drafts_are_planned_by_the_name_of_the_gpu(model: Path, gpu: None) -> None:
    options = {"mode": "verify", "exit_threshold": 0.5, "exit_layers": [6]}
    suited = suit_runner(engine_options(model, options), model)
    assert suited["speculative_config"]["num_speculative_tokens_per_batch_size"]
