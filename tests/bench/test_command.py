"""From arguments to a job: what is accepted, and one clear line for what is not."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from exitserve import synthetic_shapes
from exitserve.bench import prompts
from exitserve.bench.command import add_command, job_of
from exitserve.bench.memory import cache_bytes
from exitserve.bench.settings import OFF, PLAIN, Setting, rotated
from exitserve.calibration_record import Calibration, OperatingPoint
from exitserve.checkpoint import MultiExit, write_multi_exit
from exitserve.costs import shape_of
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
def calibrated(model: Path) -> Path:
    point = OperatingPoint(agreement=0.98, thresholds={4: 0.5}, eos_thresholds={4: 0.8})
    found = Calibration(
        target="agreement>=0.98",
        mode="defer",
        criterion="margin",
        confidence_level=0.95,
        exit_checks="all",
        num_layers=6,
        chosen=point,
        points=(replace(point, agreement=0.9, thresholds={2: 0.3}),),
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
    with pytest.raises(ExitServeError) as error, job_of(parse(*arguments)):
        pass
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_job_for_a_model(model: Path, ids: Path) -> None:
    arguments = (model, "--prompts", ids, "--thresholds", "0.5,0.9", "--fixed-layers", 4)
    with job_of(parse(*arguments, "--batch-sizes", "1,16")) as job:
        assert job.settings == (
            PLAIN,
            OFF,
            Setting(mode="confidence", exit_threshold=0.5),
            Setting(mode="confidence", exit_threshold=0.9),
            Setting(mode="fixed", exit_layer=4),
        )
        assert job.rules.exit_layers == (2, 4)
        assert not job.synthetic
        # As many requests as the largest batch needs, the file's prompts over and over.
        assert len(job.prompts) == 16
        assert job.prompts[2] == (1, 2, 3)


def test_exit_layers_replace_the_checkpoints_own(model: Path, ids: Path) -> None:
    with job_of(parse(model, "--prompts", ids, "--exit-layers", "3,5")) as job:
        assert job.rules.exit_layers == (3, 5)


def test_a_synthetic_job_forces_its_layers_and_measures_checks_that_never_pass() -> None:
    arguments = ("--synthetic", "llama-350m", "--force-exit-layer", 12, 6)
    with job_of(parse(*arguments)) as job:
        assert job.synthetic
        assert "synthetic" in job.model_name
        assert job.settings[2:] == (
            Setting(mode="confidence", exit_threshold=synthetic_shapes.NEVER_PASSED),
            Setting(mode="fixed", exit_layer=6),
            Setting(mode="fixed", exit_layer=12),
        )
        assert {len(prompt) for prompt in job.prompts} == {synthetic_shapes.PROMPT_TOKENS}
        directory = job.model_dir
        assert directory.is_dir()
    assert not directory.exists()


def test_a_mix_needs_no_forced_layer_and_may_be_given_again(model: Path, ids: Path) -> None:
    arguments = ("--synthetic", "llama-350m", "--mixed", "0.7@6,0.5@6", "--mixed", "0.5@12")
    with job_of(parse(*arguments)) as job:
        assert job.rules.exit_layers == (6, 12)
        assert [setting.label for setting in job.settings[3:]] == [
            "70% exit at 6",
            "50% exit at 6",
            "50% exit at 12",
        ]
    with job_of(parse(model, "--prompts", ids, "--mixed", "0.7@4")) as job:
        assert job.settings[-1] == Setting(mode="mixed", exit_share=0.7, exit_layer=4)


@pytest.mark.parametrize(
    ("share", "count", "exits"), [(0.7, 8, 6), (0.7, 16, 11), (0.5, 1, 1), (0.5, 3, 2), (0.1, 4, 0)]
)
def test_as_many_requests_of_a_mix_exit_as_come_nearest(
    share: float, count: int, exits: int
) -> None:
    setting = Setting(mode="mixed", exit_share=share, exit_layer=6)
    fields = setting.fields(count)
    assert fields.count({"exit_layer": 6}) == exits
    assert fields.count({"exit_threshold": 1.0}) == count - exits
    assert setting.actual_share(count) == exits / count
    assert fields == setting.fields(count)


def test_who_exits_is_drawn_not_the_first(model: Path, ids: Path) -> None:
    fields = Setting(mode="mixed", exit_share=0.5, exit_layer=4).fields(16)
    assert fields != sorted(fields, key=str)
    assert fields != sorted(fields, key=str, reverse=True)


@pytest.mark.parametrize("name", synthetic_shapes.SHAPES)
def test_shapes_have_the_size_of_their_name(name: str) -> None:
    shape = shape_of(synthetic_shapes.SHAPES[name], "bfloat16")
    numbers = (shape.num_layers * shape.layer_bytes + 2 * shape.head_bytes) / shape.dtype_bytes
    size, unit = float(name[6:-1]), {"m": 1e6, "b": 1e9}[name[-1]]
    assert numbers == pytest.approx(size * unit, rel=0.12)


def test_long_prompts_raise_the_context_as_far_as_needed() -> None:
    short = ("--synthetic", "llama-1.3b", "--mixed", "0.7@6")
    with job_of(parse(*short)) as job:
        assert job.max_model_len == synthetic_shapes.MIN_CONTEXT
    with job_of(parse(*short, "--prompt-tokens", 4096, "--max-tokens", 100)) as job:
        assert {len(prompt) for prompt in job.prompts} == {4096}
        assert job.max_model_len == 4196
        assert job.prompt_source == "4096 random tokens each"


@pytest.mark.parametrize(
    ("arguments", "gib"),
    [
        (["llama-350m"], 1),
        # 8 rows of 33 blocks, and a spare one, of 128 tokens in 24 layers of 2 KiB: 1.55 GiB.
        (["llama-1.3b", "--prompt-tokens", 4096], 2),
        # The same in float32: 3.1 GiB.
        (["llama-1.3b", "--prompt-tokens", 4096, "--dtype", "float32"], 4),
        # One request of the whole context must fit, however short the prompts: 1.5 GiB and a block.
        (["llama-1.3b", "--max-model-len", 32768], 2),
    ],
)
def test_the_cache_holds_the_largest_batch(arguments: list[object], gib: int) -> None:
    with job_of(parse("--force-exit-layer", 6, "--synthetic", *arguments)) as job:
        assert math.ceil(cache_bytes(job) / 2**30) == gib


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--thresholds", "0.5,high"], "--thresholds 'high'"),
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
        (["--seconds", "-1"], "--seconds"),
        (["--requests", "0"], "--requests"),
        (["--dtype", "int8"], "allowed: auto, float32, bfloat16"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--prompts", "no/such/file"], "cannot read the text file"),
        (["--force-exit-layer", "2"], "--fixed-layers"),
        (["--prompt-tokens", "9"], "belongs to --synthetic"),
        (["--mixed", "0.7"], "for example 0.7@6"),
        (["--mixed", "0.7@4,"], "for example 0.7@6"),
        (["--mixed", "0.7@4.5"], "for example 0.7@6"),
        (["--mixed", "1@4"], "above 0 and below 1"),
        (["--mixed", "nan@4"], "above 0 and below 1"),
        (["--mixed", "0.7@3"], "exit_layer 3"),
        (["--mixed", "0.7@4", "--mixed", "0.7@4"], "twice"),
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
        (["--synthetic", "llama-350m", "--mixed", "0.7@24"], "1..23"),
        (["--synthetic", "llama-350m", "--mixed", "0.7@6", "--prompt-tokens", "0"], "at least 1"),
        (["--synthetic", "llama-350m", "--mixed", "0.7@6", "--prompt-tokens", "8190"], "8192"),
    ],
)
def test_bad_choices_of_a_model_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_text_prompts_need_a_tokenizer(model: Path) -> None:
    assert "prompt_token_ids" in refused(model)


def test_a_line_of_a_file_is_not_a_line_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert prompts.load_prompts(path) == ("a\u2028b", "c")


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


def test_forced_confidence_and_the_modes_by_it() -> None:
    forced = ("--synthetic", "llama-350m", "--force-exit-layer", 6, "--force-confidence", 0.8)
    with job_of(parse(*forced, "--modes", "defer,verify", "--thresholds", 0.5)) as job:
        assert [setting.mode for setting in job.settings] == ["plain", "off", "defer", "verify"]
        assert job.rules.exit_layers == (6,)
        assert job.forced == {"confidence": 0.8, "acceptance": 1.0}
        assert job.drafts
        engine = job.engine_options(drafting=True)
        assert engine["mode"] == "verify"
        assert "mode" not in job.engine_options(drafting=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--force-confidence", 0.8), "need --synthetic"),
        (("--force-acceptance", 0.8), "need --synthetic"),
        (("--num-drafts", 100), "from 1 to 64"),
        (("--modes", "confidant"), "confidence, defer, verify"),
    ],
)
def test_what_the_modes_need(model: Path, arguments: tuple[object, ...], said: str) -> None:
    assert said in refused(model, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--force-acceptance", 0.8), "--force-confidence"),
        (("--force-confidence", 1.5), "from 0 to 1"),
    ],
)
def test_what_forcing_needs(arguments: tuple[object, ...], said: str) -> None:
    assert said in refused("--synthetic", "llama-350m", "--force-exit-layer", 6, *arguments)


def test_calibrated_thresholds_stand_beside_numbers_in_their_own_mode(calibrated, ids) -> None:
    arguments = (calibrated, "--prompts", ids, "--thresholds", "0.5,auto,auto:0.9")
    with job_of(parse(*arguments)) as job:
        *_, auto, cheaper = job.settings
        assert (auto.label, cheaper.label) == ("defer auto", "defer auto:0.9")
        assert auto.fields(2) == [{"exit_threshold": "auto", "exit_mode": "defer"}] * 2
        assert cheaper.fields(1) == [{"exit_target": 0.9, "exit_mode": "defer"}]
        assert job.rules.policy_for(cheaper.fields(1)[0]).thresholds_at(2)[0] == 0.3


def test_without_thresholds_the_calibrated_ones_are_measured(calibrated: Path, ids: Path) -> None:
    with job_of(parse(calibrated, "--prompts", ids)) as job:
        assert [one.label for one in job.settings[2:]] == ["defer auto"]
    with job_of(parse(write_uncalibrated(calibrated), "--prompts", ids)) as job:
        assert [one.label for one in job.settings[2:]] == ["threshold 0.7"]


def test_calibrated_thresholds_that_are_full_depth_are_not_measured_twice(calibrated, ids) -> None:
    arguments = (calibrated, "--prompts", ids, "--thresholds", "auto:0.999")
    assert "leave it out" in refused(*arguments)
    assert "run exitserve calibrate" in refused(write_uncalibrated(calibrated), *arguments[1:])


def write_uncalibrated(model: Path) -> Path:
    write_multi_exit(model, MultiExit(exit_layers=(2, 4)))
    return model
