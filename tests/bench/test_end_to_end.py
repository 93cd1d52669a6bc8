"""The real thing on a tiny random checkpoint: engines, interleaved, and a report."""

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exitserve.bench import engines
from exitserve.bench.command import add_command
from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.engine.launch import stop_engine
from exitserve.errors import ExitServeError

NUM_LAYERS, EXIT_LAYERS = 6, (2, 4)
REQUESTS, MAX_TOKENS = 2, 24
MODES = ("plain", "off", "confidence", "defer", "verify")
# Requests of other sizes would do; two batch sizes show that batch 2 is one batch, batch 1 two.
ARGUMENTS = (
    f"--thresholds 0.1 --modes confidence,defer,verify --num-drafts 3 --batch-sizes 1,2 "
    f"--requests {REQUESTS} --max-tokens {MAX_TOKENS} --repeats 2 --seconds 0 --dtype float32 "
    "--enforce-eager "
    "--max-model-len 128"
)


def save_tiny(directory: Path) -> None:
    """Weights are wide apart, so that confidences differ and some tokens exit."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.12,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_multi_exit(directory, MultiExit(exit_layers=EXIT_LAYERS))


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    args = parser.parse_args(["bench", *arguments])
    code: int = args.run(args)
    return code


def check_case(case: dict[str, Any]) -> None:
    tokens = REQUESTS * (MAX_TOKENS - 1)
    by_layer = {int(layer): count for layer, count in case["exit_layers"].items()}
    assert set(by_layer) == {*EXIT_LAYERS, NUM_LAYERS}
    assert sum(by_layer.values()) == tokens
    depth = sum(layer * count for layer, count in by_layer.items())
    assert case["mean_depth"] == pytest.approx(depth / tokens, abs=1e-3)
    assert case["depth_speedup"] == pytest.approx(NUM_LAYERS * tokens / depth, abs=1e-3)
    wall, load = case["wall_speedup"], case["load_wall_speedup"]
    assert wall["min"] <= wall["median"] <= wall["max"]
    assert 0 < load["min"] <= load["median"] <= load["max"]
    if case["mode"] == "rival":
        assert case["limit_speedup"] is case["efficiency"] is None
    else:
        limit = case["limit_speedup"]
        assert case["efficiency"] == pytest.approx(wall["median"] / limit, rel=1e-3)
    assert case["tpot_ms"]["median"] <= case["tpot_ms"]["p99"]
    assert case["tokens_per_second"] > 0
    if case["mode"] in {"plain", "off", "verify", "rival"}:
        assert case["depth_speedup"] == 1.0
        assert case["limit_speedup"] == 1.0 or case["mode"] in {"verify", "rival"}
        # float32 on both sides: full depth is the greedy choice of full depth.
        assert case["agreement"] == 1.0
    if case["mode"] == "rival":
        assert 0 <= case["accepted"] <= case["drafted"]
        assert case["rival"] == "ngram" or case["accepted"] > 0
    if case["mode"] == "verify":
        assert 0 <= case["accepted"] <= case["drafted"]
        assert case["drafted"] > 0
        assert case["mean_layers_run"] >= NUM_LAYERS
    if case["mode"] == "confidence" and case["batch_size"] == 1:
        assert 0.9 * case["depth_speedup"] < case["limit_speedup"] < case["depth_speedup"]
    if case["mode"] == "defer":
        assert case["mean_depth"] < case["mean_layers_run"]


@pytest.fixture(params=["one process", pytest.param("processes", marks=pytest.mark.nightly)])
def rivals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is compared too. Engines in one process have nobody who polls for a second after each
    message, as vLLM's workers do; what "ngram" imports stops another engine's start there.
    """
    # No rest between engines: what one does while another is timed changes no count.
    monkeypatch.setattr(engines, "SETTLE_SECONDS", 0)
    if request.param == "processes":
        yield ["draft", "ngram"]
        return
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments, ended = engines._arguments, list[Any]()
    here = {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 64 << 20}
    monkeypatch.setattr(engines, "_arguments", lambda job: arguments(job) | here)
    # They share what the end of one takes along: all end together.
    monkeypatch.setattr(engines, "stop_engine", ended.append)
    yield ["draft"]
    for engine in ended:
        stop_engine(engine)
    # vLLM remembers the environment as it was; the next test may change it.
    importlib.import_module("vllm.envs").disable_envs_cache()


def test_bench_end_to_end(
    rivals: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, prompts = tmp_path / "tiny", tmp_path / "out", tmp_path / "prompts.jsonl"
    save_tiny(model)
    lines = [{"prompt_token_ids": [5, 9, 17]}, {"prompt_token_ids": list(range(20, 60))}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    # The model as its own draft model is always right.
    names = ",".join(f"draft:{model}" if one == "draft" else one for one in rivals)
    work = ("--rivals", names, "--prompts", str(prompts), "--out", str(out))
    arguments = (str(model), *work, *ARGUMENTS.split())

    assert bench(*arguments) == 0

    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["schema_version"] == 1
    assert report["model"] == str(model)
    assert report["synthetic"] is False
    assert report["settings"]["prefix_caching"] is False
    assert report["settings"]["dtype"] == "float32"
    modes = [*MODES, *["rival" for _ in rivals]]
    assert [(case["batch_size"], case["mode"]) for case in report["cases"]] == [
        (size, mode) for size in (1, 2) for mode in modes
    ]
    for case in report["cases"]:
        check_case(case)
    # The same requests exit at the same layers whoever shares the batch.
    halves = report["cases"][: len(modes)], report["cases"][len(modes) :]
    for alone, shared in zip(*halves, strict=True):
        assert alone["exit_layers"] == shared["exit_layers"]
    for cases in halves:
        perplexity = {case["mode"]: case["perplexity"] for case in cases}
        assert perplexity["verify"] == perplexity["plain"] == perplexity["off"] > 1
    assert any(case["exit_layers"]["4"] for case in report["cases"] if case["mode"] == "confidence")
    assert "plain vLLM" in (out / "report.md").read_text(encoding="utf-8")
    assert (out / "wall_speedup.png").stat().st_size > 10_000
    assert "plain vLLM" in capsys.readouterr().out
    # What the engines print while they load is kept, but not shown.
    assert (out / "engines.log").is_file()

    with pytest.raises(ExitServeError, match="--overwrite"):
        bench(*arguments)
