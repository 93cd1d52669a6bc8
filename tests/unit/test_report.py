"""The parts that all reports share."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from exitserve.errors import ExitServeError
from exitserve.reporting.report import prepare_out_dir, publish, terminal_table, write_json


def test_out_dir_with_content_needs_overwrite_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "engines.log").touch()  # of a run that failed
    prepare_out_dir(tmp_path, overwrite=False)
    kept = tmp_path / "notes.txt"
    kept.write_text("mine", encoding="utf-8")
    with pytest.raises(ExitServeError, match="--overwrite"):
        prepare_out_dir(tmp_path, overwrite=False)
    prepare_out_dir(tmp_path, overwrite=True)
    assert kept.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("overwrite", [True, False])
def test_out_dir_that_is_a_file_is_refused(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ExitServeError, match="is a file"):
        prepare_out_dir(path, overwrite=overwrite)
    with pytest.raises(ExitServeError, match="cannot make"):
        prepare_out_dir(path / "below", overwrite=overwrite)


def test_json_never_holds_what_other_readers_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"value": math.nan})


def test_publish_shows_the_short_form_and_where_the_rest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [terminal_table("title", ("a", "b"), [("x", "1")]), "Warning: [0.5] is low"]
    publish(tmp_path, {"model": "m"}, "# page\n", {"curve": Figure()}, shown)
    printed = capsys.readouterr().out
    assert "title" in printed and "Warning: [0.5] is low" in printed
    assert str(tmp_path / "report.md") in printed.replace("\n", "")
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(data.items()) == [("schema_version", 1), ("model", "m")]
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "# page\n"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    publish(None, {}, "", {}, ["only this"])
    assert capsys.readouterr().out == "only this\n"
