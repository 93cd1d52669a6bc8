"""From arguments to a plan: what is accepted, and one clear line for what is not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from exitserve.bench import prompts, synthetic
from exitserve.bench.command import add_command, plan_of
from exitserve.bench.settings import OFF, PLAIN, Setting, rotated
from exitserve.errors import ExitServeError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "multi_exit": {"version": 1, "exit_layers": [2, 4]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint as long as nobody loads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2, 3]}\n{"prompt_token_ids": [4]}\n')
    return path


def parse(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    return parser.parse_args(["bench", "--out", "unused", *map(str, arguments)])


def refused(*arguments: object) -> str:
    with pytest.raises(ExitServeError) as error, plan_of(parse(*arguments)):
        pass
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_model_plan(model: Path, ids: Path) -> None:
    arguments = (model, "--prompts", ids, "--thresholds", "0.5,0.9", "--fixed-layers", 4)
    with plan_of(parse(*arguments, "--batch-sizes", "1,16")) as plan:
        assert plan.settings == (
            PLAIN,
            OFF,
            Setting(mode="confidence", exit_threshold=0.5),
            Setting(mode="confidence", exit_threshold=0.9),
            Setting(mode="fixed", exit_layer=4),
        )
        assert plan.rules.exit_layers == (2, 4)
        assert not plan.synthetic
        # As many requests as the largest batch needs, the file's prompts over and over.
        assert len(plan.prompts) == 16
        assert plan.prompts[2] == (1, 2, 3)


def test_exit_layers_replace_the_checkpoints_own(model: Path, ids: Path) -> None:
    with plan_of(parse(model, "--prompts", ids, "--exit-layers", "3,5")) as plan:
        assert plan.rules.exit_layers == (3, 5)


def test_a_synthetic_plan_forces_its_layers_and_measures_checks_that_never_pass() -> None:
    arguments = ("--synthetic", "llama-350m", "--force-exit-layer", 12, 6)
    with plan_of(parse(*arguments)) as plan:
        assert plan.synthetic
        assert "synthetic" in plan.model_name
        assert plan.settings[2:] == (
            Setting(mode="confidence", exit_threshold=synthetic.NEVER_PASSED),
            Setting(mode="fixed", exit_layer=6),
            Setting(mode="fixed", exit_layer=12),
        )
        assert {len(prompt) for prompt in plan.prompts} == {synthetic.PROMPT_TOKENS}
        directory = plan.model_dir
        assert directory.is_dir()
    assert not directory.exists()


def test_checked_layers_follow_the_policy(model: Path, ids: Path) -> None:
    with plan_of(parse(model, "--prompts", ids, "--fixed-layers", 4)) as plan:
        checked = {s.label: s.checked_layers(plan.rules) for s in plan.settings}
    assert checked["exits off"] == checked["plain vLLM"] == ()
    assert checked["threshold 0.5"] == (2, 4)
    assert checked["exit at 4"] == (4,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--thresholds", "0.5,high"], "--thresholds '0.5,high'"),
        (["--thresholds", "-1"], "--thresholds must be"),
        (["--thresholds", "nan"], "--thresholds must be"),
        (["--thresholds", "1.5"], "below 1"),
        (["--thresholds", "0.5,0.5"], "twice"),
        (["--fixed-layers", "3"], "exit_layer 3"),
        (["--exit-layers", "6"], "1..5"),
        (["--exit-layers", "4,2"], "ascend"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1"),
        (["--batch-sizes", ","], "--batch-sizes"),
        (["--batch-sizes", "8,8"], "once"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--repeats", "0"], "--repeats"),
        (["--requests", "0"], "--requests"),
        (["--dtype", "int8"], "allowed: auto, float32, bfloat16"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--prompts", "no/such/file"], "cannot read prompts"),
        (["--force-exit-layer", "2"], "--fixed-layers"),
        (["--synthetic", "llama-350m"], "either MODEL"),
    ],
)
def test_bad_arguments_are_named(model: Path, ids: Path, arguments: list[str], said: str) -> None:
    assert said in refused(model, "--prompts", ids, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either MODEL"),
        (["no/such/model"], "no model directory"),
        (["--synthetic", "llama-35m"], "Did you mean 'llama-350m'?"),
        (["--synthetic", "llama-350m"], "no exit layers"),
        (["--synthetic", "llama-350m", "--force-exit-layer", "24"], "1..23"),
        (["--synthetic", "llama-350m", "--force-exit-layer", "six"], "--force-exit-layer"),
        (["--synthetic", "llama-350m", "--fixed-layers", "6"], "--force-exit-layer"),
        (["--synthetic", "llama-350m", "--prompts", "x"], "--prompts"),
    ],
)
def test_bad_choices_of_a_model_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_text_prompts_need_a_tokenizer(model: Path) -> None:
    assert "prompt_token_ids" in refused(model)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no prompts"),
        ("{", "not valid JSON"),
        ("[1]", "no usable prompt"),
        ('{"prompt": ""}', "no usable prompt"),
        ('{"prompt_token_ids": [1, -1]}', "no usable prompt"),
        ('{"prompt_token_ids": [true]}', "no usable prompt"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ExitServeError, match=said):
        prompts.load_prompts(path)


def test_prompt_files_of_both_kinds(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("def f(x):\n\nclass A:\n", encoding="utf-8")
    lines.write_text('{"prompt": "def g():\\n"}\n', encoding="utf-8")
    assert prompts.load_prompts(text) == ("def f(x):", "class A:")
    assert prompts.load_prompts(lines) == ("def g():\n",)
    assert len(prompts.load_prompts(None)) == 12


def test_every_setting_goes_first_once() -> None:
    settings = [PLAIN, OFF, Setting(mode="fixed", exit_layer=2)]
    orders = [rotated(settings, repeat) for repeat in range(4)]
    assert {order[0] for order in orders[:3]} == set(settings)
    assert orders[0] == orders[3] == settings
    assert all(sorted(map(str, order)) == sorted(map(str, settings)) for order in orders)


def test_the_command_line_part_is_light_to_import() -> None:
    code = (
        "import sys, exitserve.bench.command\n"
        "sys.exit(bool({'torch', 'vllm', 'matplotlib', 'rich', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
