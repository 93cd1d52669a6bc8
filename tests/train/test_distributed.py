"""Several processes train what one process trains: data parallel, and sharded.

The processes are CPU processes that talk through gloo, started by torchrun as a user starts them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exitserve.errors import ExitServeError
from exitserve_training.callbacks import Gradients
from exitserve_training.objectives.registry import OBJECTIVES

from ..shapes import LLAMA
from .conftest import history, logged

pytestmark = pytest.mark.nightly

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]

PROGRAM = Path(__file__).with_name("two_processes.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAINING = {
    "max_steps": 7,
    "save_steps": 3,
    "save_total_limit": 10,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "disable_tqdm": True,
}
FREEZING: dict[str, Any] = {
    "objectives": [{"name": "aligned", "sample": 1}],
    "exit_layers": [1, 2, 3],
    "exit_aware": {"thresholds": [0.0, 0.02]},
    "training": TRAINING,
}
PROJECTOR: dict[str, Any] = {
    "objectives": [{"name": "aligned", "sample": 1}, {"name": "nitp", "weight": 0.5}],
    "exit_layers": [1, 2, 3],
    "adagc": {"warmup_steps": 2},
    "training": TRAINING,
}
TIMED = ("max_minutes=0.01", "training.max_steps=1000000")


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TORCHRUN, *command], env=environment, capture_output=True, text=True, timeout=300
    )


def run_commands(folder: Path, kind: str, given: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Runs commands in two processes, one after another; by process, what each of them said."""
    (folder / "commands.json").write_text(json.dumps(given))
    done = launch(str(PROGRAM), str(folder), *([kind] if kind else []))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in (0, 1)]


def assert_same_run(found: Path, expected: Path, tolerance: float) -> None:
    """The same losses and metrics at each step, evaluation, and weights."""
    entries = list(zip(*(history(out / "checkpoint-7") for out in (found, expected)), strict=True))
    assert len([None for entry, _ in entries if "loss" in entry]) == 7
    for entry, other in entries:
        # The last of an epoch's batches is not as full, so a step is another share of it.
        assert entry == pytest.approx(
            {**other, "epoch": entry["epoch"]}, rel=tolerance, abs=tolerance
        )
    reports = [json.loads((out / "report.json").read_text()) for out in (found, expected)]
    for key in ("tokens_seen", "steps", "parameters", "architecture", "train_tokens"):
        assert reports[0][key] == reports[1][key]
    for depth, quality in reports[1]["layers"].items():
        assert reports[0]["layers"][depth]["loss"] == pytest.approx(quality["loss"], rel=1e-4)
    assert_close_weights(found, expected, tolerance)


def assert_close_weights(found: Path, expected: Path, tolerance: float) -> None:
    weights = load_file(found / "model.safetensors")
    others = load_file(expected / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        # Adam divides by the gradient's size, so rounding shows where a gradient is tiny.
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=10 * tolerance)


def assert_only_the_first_wrote(out: Path) -> None:
    assert {path.name for path in out.iterdir() if not path.name.startswith("check")} >= {
        "config.json",
        "data",
        "logs",
        "model.safetensors",
        "report.json",
        "report.md",
        "training_run.json",
    }
    # events.out.tfevents.TIME.HOST.PROCESS.NUMBER
    assert len({path.name.split(".")[-2] for path in (out / "logs").iterdir()}) == 1
    assert not list(out.glob("*.bin"))
    assert (out / "checkpoint-3" / "rng_state_1.pth").is_file()


def with_accumulation(recipe: MakeRecipe, out: Path, **keys: Any) -> Path:
    """One process that makes the micro-batches of two processes one after another."""
    training = {**TRAINING, "gradient_accumulation_steps": 2}
    return recipe(**{**keys, "training": training, "output_dir": str(out)})


def validation(text_file: Path) -> dict[str, Any]:
    """9 sequences for evaluation: no multiple of what two processes evaluate at once."""
    return {"files": [str(text_file)], "sequence_length": 32, "validation_blocks": 9}


def test_torchrun_trains_what_one_process_trains(
    make_recipe: MakeRecipe, text_file: Path, tmp_path: Path, train: Train
) -> None:
    """As a user starts it. Sampled exits, random freezing, layer dropout.

    Two micro-batches of 2, in two processes or accumulated: sums of two are the same in any order,
    so the runs are equal to the last bit but for the order in which a batch's gradients are
    added. One batch of 4 gives the same losses and weights too. What is logged for each layer
    does not compare: it is a mean over the positions that reach it, of which micro-batches have
    unequal numbers.
    """
    keys = {**FREEZING, "data": validation(text_file)}
    assert train(with_accumulation(make_recipe, tmp_path / "one", **keys)) == 0
    recipe = make_recipe(**keys)
    done = launch("-m", "exitserve", "train", str(recipe))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert_same_run(out, tmp_path / "one", 1e-6)
    whole = tmp_path / "whole"
    of_four = {**TRAINING, "per_device_train_batch_size": 4}
    assert train(make_recipe(**{**keys, "training": of_four, "output_dir": str(whole)})) == 0
    losses = [[e["loss"] for e in logged(run)] for run in (out, whole)]
    # Rounding, which Adam's division enlarges step by step.
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert_close_weights(out, whole, 1e-4)
    assert_only_the_first_wrote(out)
    # One table, one line of each log: the second process is silent.
    assert done.stdout.count("Checkpoint and report") == 1
    assert done.stdout.count(" tokens/s") == 7
    frozen = [entry["frozen_share"] for entry in logged(out)]
    assert sum(frozen) / len(frozen) > 0.1


def test_two_processes_overwrite_resume_and_stop_together(
    make_recipe: MakeRecipe, text_file: Path, tmp_path: Path, train: Train
) -> None:
    """Sampled exits, NITP's projector, AdaGC; against a batch of 4 in one process.

    Every sequence has as many positions there, so a mean over 4 is the mean of two means over 2.
    Losses differ by rounding alone: sums of 124 or 62 tokens, 1e-7 each, grown by 7 steps of Adam.
    """
    one = tmp_path / "one"
    keys = {**PROJECTOR, "data": validation(text_file)}
    training = {**TRAINING, "per_device_train_batch_size": 4}
    assert train(make_recipe(**{**keys, "training": training, "output_dir": str(one)})) == 0
    out = tmp_path / "out"
    # What is to be overwritten: another run, of one process.
    assert train(make_recipe(**keys), "training.max_steps=1", "objectives=[ce]") == 0
    recipe = str(make_recipe(**keys))
    given = [
        ["train", recipe],  # whose folder is not empty
        ["train", recipe, "overwrite=true", "NaN"],
        ["train", recipe, "resume=true"],
        # A process that made one step more than the other would wait for it forever.
        ["train", recipe, f"output_dir={tmp_path / 'timed'}", *TIMED],
    ]
    first, second = run_commands(tmp_path, "", given)
    assert [said["code"] for said in first] == [2, 2, 0, 0]
    assert [said["code"] for said in second] == [2, 2, 0, 0]
    assert "exists and is not empty" in first[0]["errors"]
    # The second process met it, the first says it, and both end before the step.
    (line,) = [x for x in first[1]["errors"].splitlines() if x.startswith("exitserve: ")]
    assert "loss of objective aligned = nan at step 4" in line
    assert f"the last good checkpoint is '{out / 'checkpoint-3'}'" in line
    for said in second:
        assert "exitserve: " not in said["errors"]
        assert "Traceback" not in said["errors"]
        assert "loss" not in said["out"]
    # Resumed from step 3, the run is that of one process that nothing happened to.
    assert_same_run(out, one, 1e-4)
    assert_only_the_first_wrote(out)
    assert load_file(out / "checkpoint-7" / "objectives.safetensors").keys() == {
        "parts.nitp.projector.down.weight",
        "parts.nitp.projector.up.weight",
    }


def test_sharded_training_is_that_of_one_process(
    make_recipe: MakeRecipe, text_file: Path, tmp_path: Path, train: Train
) -> None:
    """FSDP2: each layer and the rest in shards, in the real command, stopped and resumed.

    With AdaGC, whose norms are of whole gradients; a model in bfloat16 is saved as it was given.
    """
    keys = {**PROJECTOR, "data": validation(text_file)}
    one, out = tmp_path / "one", tmp_path / "out"
    assert train(with_accumulation(make_recipe, one, **keys)) == 0
    shards = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    training = {**TRAINING, "fsdp": True, "fsdp_config": shards}
    recipe = str(make_recipe(**{**keys, "training": training}))
    sharded = json.dumps({**shards, "state_dict_type": "SHARDED_STATE_DICT"})
    elsewhere = [f"output_dir={tmp_path / 'shards'}", f"training.fsdp_config={sharded}"]
    half = AutoModelForCausalLM.from_pretrained(one, dtype=torch.bfloat16)
    for saves in (half, AutoTokenizer.from_pretrained(one)):
        saves.save_pretrained(tmp_path / "half")
    tuned = [f"model={tmp_path / 'half'}", "config=null", "tokenizer=null"]
    given = [
        ["train", recipe, "NaN"],
        ["train", recipe, "resume=true"],
        ["train", recipe, *elsewhere, "NaN"],
        ["train", recipe, *elsewhere, "resume=true"],
        ["train", recipe, *tuned, f"output_dir={tmp_path / 'tuned'}"],
    ]
    first, second = run_commands(tmp_path, "fsdp", given)
    assert [said["code"] for said in first[:-1]] == [2, 0, 2, 0, 0], first
    assert [said["code"] for said in second[:-1]] == [2, 0, 2, 0, 0]
    for folder in (out, tmp_path / "shards"):
        assert_same_run(folder, one, 1e-4)
    assert (out / "checkpoint-7" / "pytorch_model_fsdp.bin").is_file()
    assert (tmp_path / "shards" / "checkpoint-7" / "pytorch_model_fsdp_0").is_dir()
    given_as, saved_as = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(file).items()}
        for file in (tmp_path / name / "model.safetensors" for name in ("half", "tuned"))
    )
    assert saved_as == given_as
    assert AutoConfig.from_pretrained(tmp_path / "tuned").dtype == torch.bfloat16
    for differences in (first[-1]["differences"], second[-1]["differences"]):
        assert {case["parameters"] for case in differences.values()} == {40, 41}
        for case in differences.values():
            # Frozen and not, so that what confidence decided matters.
            assert 0.1 < case["frozen_share"] < 0.9
            assert case["projector"] > 1e-4
            # The sum of two processes' float32 gradients, each rounded once more.
            assert case["loss"] < 1e-5
            assert case["gradients"] < 1e-5


def test_accelerate_that_starts_one_process_only_is_refused(
    make_recipe: MakeRecipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --cpu --num_processes 2` without mpirun: it would train on half."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ExitServeError, match="has started one process, not several"):
        train(make_recipe())


UNTIED = {"tie_word_embeddings": False}
TRAINED: dict[str, dict[str, Any]] = {
    **{
        name: {"objectives": [name] if name in ("ce", "aligned") else ["ce", name]}
        for name in OBJECTIVES
        if name not in ("headless", "separate_classifiers")
    },
    "classifiers": {"objectives": ["separate_classifiers"]},
    "headless": {"objectives": ["headless"], "config": UNTIED},
    "headless, regularised": {"objectives": ["headless", "simreg"], "config": UNTIED},
    "measured": {"objectives": ["ce", {"name": "nitp", "weight": 0.0}]},
    "bert": {"config": {"architecture": "bert", "num_key_value_heads": None}},
    "headless bert": {
        "objectives": ["headless"],
        "config": {"architecture": "bert", "num_key_value_heads": None},
        "exit_layers": [],
    },
    "experts": {
        "config": {
            "architecture": "qwen3_moe",
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        }
    },
}


@pytest.mark.parametrize("name", TRAINED)
def test_all_that_is_trained_has_a_gradient(
    make_recipe: MakeRecipe, train: Train, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Data parallelism waits for each; `ddp_find_unused_parameters` is off."""
    without: list[str] = []

    def look(_self: Gradients, *_args: Any, **kwargs: Any) -> None:
        for parameter_name, parameter in kwargs["model"].named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                without.append(parameter_name)

    monkeypatch.setattr(Gradients, "on_pre_optimizer_step", look)
    sizes = LLAMA | TRAINED[name].get("config", {})
    recipe = make_recipe(**{**TRAINED[name], "config": sizes})
    assert train(recipe, "training.max_steps=2") == 0
    assert without == []
