"""From arguments to a job: what is accepted, and one clear line for what is not."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from exitserve.bench import prompts
from exitserve.bench.command import add_command, job_of, run_job
from exitserve.bench.settings import rotated
from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.errors import ExitServeError
from exitserve.settings import OFF, PLAIN, Setting

from ..shapes import calibration_of

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
def calibrated(model: Path) -> Path:
    point = OperatingPoint(agreement=0.98, thresholds={4: 0.5}, eos_thresholds={4: 0.8})
    found = calibration_of(
        point,
        replace(point, agreement=0.9, thresholds={4: 0.3}),
        replace(point, agreement=0.8, thresholds={2: 0.2}),
        criterion="margin",
        num_layers=6,
    )
    block = MultiExit(exit_layers=(2, 4), criterion="margin", calibration=found)
    write_multi_exit(model, block)
    return model


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
    with pytest.raises(ExitServeError) as error:
        job_of(parse(*arguments))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_job_for_a_model(model: Path, ids: Path) -> None:
    arguments = (model, "--prompts", ids, "--thresholds", "0.5,0.9")
    job = job_of(parse(*arguments, "--batch-sizes", "1,16"))
    assert job.settings == (
        PLAIN,
        OFF,
        Setting(mode="confidence", exit_threshold=0.5),
        Setting(mode="confidence", exit_threshold=0.9),
    )
    assert job.rules.exit_layers == (2, 4)
    assert not job.synthetic
    # As many requests as the largest batch needs, the file's prompts over and over.
    assert len(job.prompts) == 16
    assert job.prompts[2] == (1, 2, 3)


def test_exit_layers_replace_the_checkpoints_own(model: Path, ids: Path) -> None:
    job = job_of(parse(model, "--prompts", ids, "--exit-layers", "3,5"))
    assert job.rules.exit_layers == (3, 5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--thresholds", "0.5,high"], "--thresholds 'high'"),
        (["--thresholds", "-1"], "--thresholds must be"),
        (["--thresholds", "1.5"], "below 1"),
        (["--thresholds", "0.5,0.5"], "twice"),
        (["--exit-layers", "6"], "1..5"),
        (["--exit-layers", "4,2"], "ascend"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1"),
        (["--batch-sizes", ","], "--batch-sizes"),
        (["--batch-sizes", "8,8"], "once"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--repeats", "0"], "--repeats"),
        (["--seconds", "nan"], "--seconds"),
        (["--requests", "0"], "--requests"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--prompts", "no/such/file"], "cannot read the text file"),
    ],
)
def test_bad_arguments_are_named(model: Path, ids: Path, arguments: list[str], said: str) -> None:
    assert said in refused(model, "--prompts", ids, *arguments)


def test_a_model_that_is_not_there_is_named() -> None:
    assert "no model directory" in refused("no/such/model")


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--num-drafts", 100), "from 1 to 64"),
        (("--modes", "confidant"), "confidence, defer, verify"),
    ],
)
def test_what_the_modes_need(model: Path, arguments: tuple[object, ...], said: str) -> None:
    assert said in refused(model, *arguments)


def test_calibrated_thresholds_stand_beside_numbers_in_their_own_mode(calibrated, ids) -> None:
    arguments = (calibrated, "--prompts", ids, "--thresholds", "0.5,auto,auto:0.9")
    job = job_of(parse(*arguments))
    *_, auto, cheaper = job.settings
    assert (auto.label, cheaper.label) == ("defer auto", "defer auto:0.9")
    assert auto.fields == {"exit_threshold": "auto", "exit_mode": "defer"}
    assert cheaper.fields == {"exit_target": 0.9, "exit_mode": "defer"}
    assert cheaper.policy(job.rules).thresholds_at(4)[0] == 0.3
    assert "at different exit layers, 2, 4" in refused(*arguments[:4], "auto,auto:0.8")


def test_without_thresholds_the_calibrated_ones_are_measured(calibrated: Path, ids: Path) -> None:
    job = job_of(parse(calibrated, "--prompts", ids))
    assert [one.label for one in job.settings[2:]] == ["defer auto"]
    job = job_of(parse(write_uncalibrated(calibrated), "--prompts", ids))
    assert [one.label for one in job.settings[2:]] == ["threshold 0.7"]


def write_uncalibrated(model: Path) -> Path:
    write_multi_exit(model, MultiExit(exit_layers=(2, 4)))
    return model


def test_engines_that_fail_are_one_line(
    model: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr("exitserve.bench.command._compare", fails)
    with pytest.raises(ExitServeError, match=r"initialization failed.*The log above says how"):
        run_job(job_of(parse(model, "--prompts", ids)), tmp_path / "out", overwrite=False)
