"""Mistakes are told in one line, before anything slow starts and before a folder is made."""

import json
import shutil
from pathlib import Path

import pytest

from exitserve.cli import main

SHORT = Path(__file__).parents[2] / "exitserve" / "__main__.py"


@pytest.fixture
def fails(bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "held-out.txt"
    data.write_text("for index in range(10):\n    print(index)\n" * 30, encoding="utf-8")

    def fails(*options: str, model: Path | str = bundled) -> str:
        given = ["--data", str(data)] if "--data" not in options else []
        out = tmp_path / "out"
        assert main(["eval", str(model), *given, "--out", str(out), *options]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("exitserve: ")
        assert not out.exists()
        return error

    return fails


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--thresholds", "high"), "--thresholds 'high' must be numbers"),
        (("--thresholds", "0"), "--thresholds must be a finite number above 0"),
        (("--thresholds", "0.5,1"), "threshold 1.0 never exits"),
        (("--thresholds", "0.5,0.5"), "given twice"),
        (("--thresholds", ","), "names none"),
        (("--modes", "fixed"), "--modes 'fixed' is unknown"),
        (("--data", "none.txt"), "cannot read the text file 'none.txt'"),
        (("--window", "33"), "--window must be at least 34"),
        (("--window", "513"), "longer than the model's context of 512"),
        (("--window", "512", "--data", str(SHORT)), "needs 512 tokens"),
        (("--prompt", "x = 1\n" * 200), "longer than the model's context of 512"),
    ],
)
def test_options(fails, options: tuple[str, ...], message: str) -> None:
    assert message in fails(*options)


def test_without_exits_there_is_a_plan(fails, bundled: Path, tmp_path: Path) -> None:
    model = tmp_path / "plain"
    shutil.copytree(bundled, model)
    config = json.loads((model / "config.json").read_text())
    del config["multi_exit"]
    (model / "config.json").write_text(json.dumps(config))
    assert "exitserve plan" in fails(model=model)
    assert "no config.json" in fails(model=tmp_path)


def test_a_folder_with_something_in_it(bundled: Path, tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}')
    (tmp_path / "report.md").write_text("precious")
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("word " * 400)
    arguments = ["eval", str(bundled), "--data", str(held_out), "--window", "40"]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*arguments[:3], str(rows), "--out", str(tmp_path / "new")]) == 2
    assert "has no text" in capsys.readouterr().err


def test_neither_text_nor_a_prompt(bundled: Path, tmp_path: Path, capsys) -> None:
    assert main(["eval", str(bundled), "--out", str(tmp_path / "out")]) == 2
    assert "--data FILE), a prompt (--prompt TEXT)" in capsys.readouterr().err
