"""`exitserve serve` refuses in one line what it cannot serve, before anything slow starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exitserve.cli import main

FLAGS = [
    ("--enable-lora", "LoRA", "without the adapter"),
    ("--lora-modules a=b", "LoRA", "without the adapter"),
    ("--pipeline-parallel-size 2", "pipeline parallelism", "stages"),
    ("--decode-context-parallel-size 2", "context parallelism", "one unsharded cache"),
    ("--data-parallel-size 2", "data parallelism", "one server for each replica"),
    ("--data-parallel-rank 0", "data parallelism", "one server for each replica"),
    ("--api-server-count 2", "--api-server-count", "use 1"),
    ("--api-server-count 0", "--api-server-count", "use 1"),
    ("--headless", "--headless", "HTTP server"),
    ("--runner pooling", "pooling", "generate none"),
    ("--convert embed", "embeddings", "generate none"),
    ("--task embed", "--task", "embeddings"),
    ("--quantization fp8", "quantised weights", "compressed-tensors"),
    ("--enable-dbo", "micro-batching", "whole batch"),
    ("--kv-offloading-size 1", "KV transfer", "skip layers"),
    ("--model-impl transformers", "--model-impl", "own model classes"),
    ("--scheduler-cls a.B", "--scheduler-cls", "drop it"),
    ("--worker-extension-cls a.B", "--worker-extension-cls", "drop it"),
    ("--no-such-flag", "--no-such-flag", "vllm serve --help"),
    ("--max-modellen 9", "--max-modellen", "Did you mean '--max-model-len'?"),
    ("--dtype float13", "--dtype", "float32"),
    ("--enable-auto-tool-choice", "--enable-auto-tool-choice", "--tool-call-parser"),
    ("--speculative-config.method ngram", "speculative decoding", "--mode verify"),
    ("--spec-model x --spec-tokens 2", "speculative decoding", "--mode verify"),
    ("--ubatch-size 2", "micro-batching", "whole batch"),
    (
        "--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role kv_both",
        "KV transfer",
        "skip layers",
    ),
    ("--port x", "--port", "invalid int value"),
    ("--mode verify", "mode 'verify'", "--exit-threshold T"),
    ("--num-drafts 4", "num_drafts", "--mode verify"),
    ("--mode verify --exit-threshold 0.5 --num-drafts 0", "num_drafts", "from 1 to 64"),
    (
        "--mode verify --exit-threshold 0.5 --logits-processors a:B",
        "--logits-processors",
        "--mode verify",
    ),
    (
        "--mode verify --exit-threshold 0.5 --speculative-config.method ngram",
        "decoding (--speculative-config)",
        "two kinds of drafts",
    ),
    ("--structured-outputs-config.backend nothing", "--structured-outputs-config", "nothing"),
]
ONLY_WITH_EXITS = ["LoRA", "speculative", "pipeline", "KV transfer", "micro-batching"]


@pytest.fixture
def serve(monkeypatch, capsys, bundled: Path) -> Any:
    """`exitserve serve` up to the point where the engine would start."""
    # Both change the environment for the whole test process.
    monkeypatch.setattr("exitserve.server.launch.prepare_environment", lambda: None)
    monkeypatch.setattr("vllm.entrypoints.serve.utils.api_utils.cli_env_setup", lambda: None)

    async def run_server(args: Any) -> None:
        print("the engine would start")

    monkeypatch.setattr("vllm.entrypoints.launchers.api_server.entry.run_server", run_server)

    def serve(*options: str, model: Path = bundled) -> tuple[int, str, str]:
        code = main(["serve", str(model), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return serve


@pytest.mark.parametrize(("flags", "feature", "reason"), FLAGS, ids=lambda text: text)
def test_a_flag(serve, flags: str, feature: str, reason: str) -> None:
    code, output, error = serve(*flags.split())
    assert code == 2 and "the engine would start" not in output
    (line,) = [line for line in error.splitlines() if line.startswith("exitserve: ")]
    assert feature in line and reason in line
    assert error.splitlines()[-1] == line


@pytest.mark.parametrize(
    "flags",
    [
        "--runner generate",
        "--api-server-count 1",
        "--exit-layer 3",
        "--mode verify --exit-threshold 0.5 --num-drafts 4",
    ],
)
def test_what_is_not_refused(serve, flags: str) -> None:
    code, output, _ = serve(*flags.split())
    assert code == 0 and "the engine would start" in output


@pytest.fixture
def checkpoint(tmp_path: Path, bundled: Path) -> Any:
    def make(**changes: Any) -> Path:
        config = json.loads((bundled / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return make


def test_a_quantised_checkpoint(serve, checkpoint) -> None:
    quantised = checkpoint(quantization_config={"quant_method": "awq", "bits": 4})
    code, _, error = serve(model=quantised)
    assert code == 2 and "'awq'" in error and "compressed-tensors" in error


def test_a_model_without_exit_layers_may_use_more_of_vllm(serve, checkpoint) -> None:
    plain = checkpoint(multi_exit=None)
    for flags, feature, _ in FLAGS:
        if any(feature.startswith(name) for name in ONLY_WITH_EXITS):
            code, output, error = serve(*flags.split(), model=plain)
            assert code == 0 and "the engine would start" in output, error
    code, _, error = serve("--mode", "verify", "--exit-threshold", "0.5", model=plain)
    assert code == 2 and "--exit-layers" in error
    code, _, error = serve("--data-parallel-size", "2", model=plain)
    assert code == 2 and "data parallelism" in error
