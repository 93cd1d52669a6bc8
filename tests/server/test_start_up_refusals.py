"""`exitserve serve` refuses in one line what it cannot serve, before anything slow starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exitserve.cli import main

MULTI_PORT = (
    "--data-parallel-size 2 --data-parallel-size-local 2 --data-parallel-multi-port-external-lb"
)
FLAGS = [
    ("--enable-lora", "LoRA", "without the adapter"),
    ("--lora-modules a=b", "LoRA", "without the adapter"),
    ("--pipeline-parallel-size 2", "pipeline parallelism", "stages"),
    ("--decode-context-parallel-size 2", "context parallelism", "one unsharded cache"),
    (MULTI_PORT, "for each rank", "one server for each replica"),
    ("--enable-elastic-ep", "--enable-elastic-ep", "one server for each replica"),
    ("--data-parallel-backend ray", "--data-parallel-backend ray", "--headless"),
    ("--distributed-executor-backend ray", "Ray", "--headless"),
    ("--api-server-count 0", "--api-server-count below 1", "--headless"),
    ("--grpc", "without HTTP", "HTTP server"),
    ("--runner pooling", "pooling", "generate none"),
    ("--convert embed", "embeddings", "generate none"),
    ("--task embed", "--task", "embeddings"),
    ("--quantization fp8", "quantised weights", "compressed-tensors"),
    ("--enable-dbo", "micro-batching", "whole batch"),
    ("--exit-threshold 0.5 --kv-offloading-size 1", "KV transfer", "--mode verify"),
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
    ("--weight-transfer-config.backend ipc", "new weights", "copies of the old ones"),
    ("--enable-batch-sharded-sampling", "sampling by ranks", "whole batch"),
    (
        "--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role kv_both --exit-layer 6",
        "KV transfer",
        "tokens exit (--exit-layer)",
    ),
    (
        "--mode defer --exit-threshold 0.5 --kv-offloading-size 1",
        "KV transfer",
        "still to be computed",
    ),
    ("--port x", "--port", "invalid int value"),
    ("--chat-template /no/such", "chat template", "/no/such"),
    ("--mode verify", "mode 'verify'", "--exit-threshold T"),
    ("--num-drafts 4", "num_drafts", "--mode verify"),
    ("--mode off --num-drafts 4", "num_drafts", "not 'off'"),
    ("--mode defer --exit-threshold 0.5 --num-drafts 0", "num_drafts", "from 1 to 64"),
    ("--mode verify --exit-threshold 0.5 --num-drafts 0", "num_drafts", "from 1 to 64"),
    ("--exits-up-to 0", "exits_up_to", "at least 1"),
    ("--mode defer --exit-threshold 0.5 --exits-up-to 4", "exits_up_to", "--mode confidence"),
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
    ("--shadow-rate 1.5", "--shadow-rate", "from 0 (off) to 1"),
    ("--shadow-rate -0.1", "--shadow-rate", "from 0 (off) to 1"),
    ("--shadow-rate nan", "--shadow-rate", "from 0 (off) to 1"),
    (
        "--shadow-rate 0.1 --mode verify --exit-threshold 0.5",
        "--shadow-rate",
        "already verifies every token",
    ),
    ("--hf-config-path elsewhere", "--hf-config-path", "config.json of MODEL"),
    ('--hf-overrides {"multi_exit":{},"n_layer":3}', "multi_exit, n_layer", "config.json of MODEL"),
    ("--shadow-rate 0.1 --max-logprobs 0", "--shadow-rate", "needs log-probabilities"),
    ("--shadow-rate 0.1 --logprobs-mode processed_logits", "--shadow-rate", "processed_logits"),
]
ONLY_WITH_EXITS = ["LoRA", "speculative", "micro-batching"]


@pytest.fixture
def serve(monkeypatch, capsys, bundled: Path) -> Any:
    """`exitserve serve` up to the point where the engine would start."""
    # Both change the environment for the whole test process.
    monkeypatch.setattr("exitserve.server.command.prepare_environment", lambda: None)
    monkeypatch.setattr("exitserve.engine.compat.command_line.cli_env_setup", lambda: None)

    async def run_server(args: Any) -> None:
        print("the engine would start", args.hf_overrides, "revision", args.revision)
        print(f"{args.model} is called {args.served_model_name}")
        print(args.port, args.enable_prefix_caching, args.additional_config["exitserve"])

    monkeypatch.setattr("vllm.entrypoints.cli.serve.run_server", run_server)

    def serve(*options: str, model: Path | None = bundled) -> tuple[int, str, str]:
        code = main(["serve", *([] if model is None else [str(model)]), *options])
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


def test_an_option_that_vllm_refuses_when_it_starts(serve, monkeypatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    async def run_server(args: Any) -> None:
        AsyncEngineArgs.from_cli_args(args).create_engine_config()

    monkeypatch.setattr("vllm.entrypoints.cli.serve.run_server", run_server)
    code, _, error = serve("--max-model-len", "99999")
    assert code == 2 and "cannot serve this: User-specified max_model_len (99999) is" in error
    assert "input_value" not in error


@pytest.mark.parametrize(
    "flags",
    [
        "--runner generate",
        "--kv-offloading-size 1",
        "--mode verify --exit-threshold 0.5 --kv-transfer-config.kv_connector X "
        "--kv-transfer-config.kv_role kv_both",
        "--tensor-parallel-size 2 --nnodes 2 --master-addr 10.0.0.1",
        "--api-server-count 1",
        "--exit-layer 6",
        "--shadow-rate 0.01",
        "--shadow-rate 0 --max-logprobs 0",
        "--mode verify --exit-threshold 0.5 --num-drafts 4",
        "--mode defer --exit-threshold 0.5 --num-drafts 4 --exit-rows frequent",
        "--mode defer --exit-threshold 0.5 --num-drafts 4 --shadow-rate 0.1",
    ],
)
def test_what_is_not_refused(serve, flags: str) -> None:
    code, output, _ = serve(*flags.split())
    assert code == 0 and "the engine would start" in output


def test_arguments_in_a_file(serve, bundled: Path, tmp_path: Path) -> None:
    """MODEL and our flags as well as vLLM's; the command line counts where both say something."""
    file = tmp_path / "serve.yaml"
    flags = "exit_threshold: 0.5\nexit-layers: [6, 12]\nport: 9\nenable-prefix-caching: false\n"
    file.write_text(f"model: {bundled}\n{flags}")
    code, output, error = serve(f"--config={file}", "--port", "8", model=None)
    assert code == 0, error
    assert f"{bundled} is called None\n8 False {{'exit_layers': [6, 12], 'exit_th" in output
    file.write_text("model: elsewhere\nexit-threshold: 0.5\n")
    code, output, _ = serve("--exit_threshold", "0.7", "--config", str(file))
    assert code == 0 and f"{bundled} is" in output and "'exit_threshold': 0.7" in output
    for text in "", "[1", "- 1":
        file.write_text(text)
        code, _, error = serve("--config", str(file), model=None)
        assert code == 2 and "must be a YAML file of flags" in error.splitlines()[-1]


BREAKABLE, INVARIANT = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"


@pytest.mark.parametrize(
    ("variables", "flags", "refused"),
    [
        ({BREAKABLE: "1"}, "", True),
        ({INVARIANT: "1"}, "", True),
        ({INVARIANT: "1", BREAKABLE: "0"}, "", False),
        ({BREAKABLE: "1"}, "--enforce-eager", False),
        ({BREAKABLE: "1"}, "--mode verify --exit-threshold 0.5 --exit-layers 6", False),
        ({}, "", False),
    ],
)
def test_breakable_graphs(
    serve, monkeypatch, variables: dict[str, str], flags: str, refused: bool
) -> None:
    """Of GPUs. Servers whose first layers draft have them: their branches are vLLM's own."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for name in (BREAKABLE, INVARIANT):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, output, error = serve(*flags.split())
    assert (code, "the engine would start" in output) == ((2, False) if refused else (0, True))
    if refused:
        assert "breakable graphs" in error and f"{BREAKABLE}=0" in error.splitlines()[-1]


@pytest.fixture
def checkpoint(tmp_path: Path, bundled: Path) -> Any:
    def make(**changes: Any) -> Path:
        config = json.loads((bundled / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return make


def test_a_revision_is_checked_and_served(serve, hub, bundled: Path, checkpoint) -> None:
    hub.publish(bundled)
    hub.publish(checkpoint(num_hidden_layers=9, multi_exit=None), "shallow")
    model = Path(hub.model)
    assert serve("--exit-layers", "10", model=model)[0] == 0
    code, _, error = serve("--revision", "shallow", "--exit-layers", "10", model=model)
    assert code == 2 and "has 9 layers" in error
    code, output, _ = serve("--revision=shallow", "--exit-layers", "5", model=model)
    assert code == 0 and "revision shallow" in output
    code, _, error = serve("--revision", "none", model=model)
    assert code == 2 and "'someone/small' at revision 'none'" in error
    assert len(error.splitlines()) == 1


def test_a_model_with_an_adapter_has_the_name_of_its_base(
    serve, make_adapter, merged_cache: Path, bundled: Path
) -> None:
    adapter = make_adapter(bundled, exits=(4, 8))
    more = ("--adapter", str(adapter), "--exit-layer", "8")  # of the adapter's exits
    code, output, error = serve(*more)
    assert code == 0 and f"/{bundled.name}+mine is called ['{bundled}']" in output, error
    assert str(merged_cache) in output
    assert "is called ['other']" in serve(*more, "--served-model-name", "other")[1]


def test_a_quantised_checkpoint(serve, checkpoint) -> None:
    quantised = checkpoint(quantization_config={"quant_method": "hqq", "bits": 4})
    code, _, error = serve(model=quantised)
    assert code == 2 and "'hqq'" in error and "compressed-tensors" in error
    group = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": False}}
    fixed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    code, _, error = serve(model=checkpoint(quantization_config=fixed))
    assert code == 2 and "scales that were fixed beforehand" in error and "dynamic" in error


def test_a_model_without_exit_layers_may_use_more_of_vllm(serve, checkpoint) -> None:
    plain = checkpoint(multi_exit=None)
    for flags, feature, _ in FLAGS:
        if any(feature.startswith(name) for name in ONLY_WITH_EXITS):
            code, output, error = serve(*flags.split(), model=plain)
            assert code == 0 and "the engine would start" in output, error
    code, _, error = serve("--mode", "verify", "--exit-threshold", "0.5", model=plain)
    assert code == 2 and "--exit-layers" in error
    code, _, error = serve("--shadow-rate", "0.5", model=plain)
    assert code == 2 and "nothing exits" in error
    code, _, error = serve("--enable-elastic-ep", model=plain)
    assert code == 2 and "engines that come and go" in error
