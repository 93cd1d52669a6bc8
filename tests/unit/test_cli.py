"""The command line: exit codes, one clear line, and help that teaches."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from exitserve.cli import build_parser, main


def _fails(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    error = capsys.readouterr().err
    assert error.startswith("exitserve: ") and error.count("\n") == 1
    return error


@pytest.fixture
def checkpoint(tmp_path: Path):
    def make(**config: object) -> str:
        known = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 12}
        (tmp_path / "config.json").write_text(json.dumps(known | config))
        return str(tmp_path)

    return make


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


COMMANDS = tuple(commands())


def test_the_command_line_does_not_grow() -> None:
    """A new argument takes the place of another, or of the default that nobody changes."""
    arguments = {
        (name, action.dest)
        for name, parser in commands().items()
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    }
    assert len(COMMANDS) <= 10
    assert len(arguments) <= 95


def test_options_without_a_flag_are_known(capsys) -> None:
    with pytest.raises(AssertionError, match="no_such_option"):
        main(["plan", "nowhere"], no_such_option=1)


def test_help_names_every_command(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert len(capsys.readouterr().out) > 300


def test_output_that_nobody_reads_ends_quietly() -> None:
    command = f"{sys.executable} -m exitserve train --schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_missing_model(capsys) -> None:
    assert "nowhere" in _fails(capsys, "serve", "nowhere")


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "ViTForImageClassification", "BloomForCausalLM"]
)
def test_an_unsupported_architecture_is_named_with_the_supported(
    capsys, checkpoint, name: str
) -> None:
    error = _fails(capsys, "serve", checkpoint(architectures=[name]))
    assert name in error and "LlamaForCausalLM, MistralForCausalLM" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exit-threshold", "nan"], "finite number above 0"),
        (["--exit-threshold", "-1"], "finite number above 0"),
        (["--exit-layers", "4,12"], "exit layer 12 is out of range"),
        (["--exit-layers", "8,4"], "must ascend"),
        (["--exit-layers", "4", "--exit-layer", "8"], "not one of this model's exit layers"),
        (["--mode", "fixed"], "--exit-layer"),
        (["--mode", "confidence"], "--exit-threshold"),
        (["--eos-threshold", "0"], "eos_threshold"),
    ],
)
def test_bad_options(capsys, checkpoint, options: list[str], message: str) -> None:
    assert message in _fails(capsys, "serve", checkpoint(), *options)


def test_without_vllm_serving_says_what_to_install(capsys, checkpoint, monkeypatch) -> None:
    monkeypatch.setattr("exitserve.engine.launch.find_spec", lambda name: None)
    assert "needs vLLM" in _fails(capsys, "serve", checkpoint())


def test_the_demo_needs_its_model(capsys, tmp_path: Path) -> None:
    assert "--model" in _fails(capsys, "demo", "--model", str(tmp_path / "none"))
