"""Hub ids: commands read the revision that was asked for, in all of its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from exitserve.bench.command import job_of as bench_job
from exitserve.checkpoint.block import MultiExit, read_config, read_multi_exit, write_multi_exit
from exitserve.checkpoint.exit_rows import save_exit_rows
from exitserve.cli import build_parser
from exitserve.engine.launch import check_rules, engine_options
from exitserve.errors import ExitServeError
from exitserve.evaluation.command import job_of as eval_job


@pytest.fixture
def model(hub, bundled: Path, tmp_path: Path) -> str:
    """Exits 6, 12, 18 on the default branch; on another, exits 4 and 8 with exit rows."""
    hub.publish(bundled)
    other = tmp_path / "other"
    shutil.copytree(bundled, other)
    name = save_exit_rows(other, [1, 5])
    write_multi_exit(other, MultiExit(exit_layers=(4, 8), rows=name))
    hub.publish(other, "frequent")
    return str(hub.model)


def test_each_revision_has_its_exits(model: str) -> None:
    for revision, layers in ((None, (6, 12, 18)), ("main", (6, 12, 18)), ("frequent", (4, 8))):
        block = read_multi_exit(model, revision)
        assert block is not None and block.exit_layers == layers
        rules = check_rules(model, {}, revision)
        assert (rules.exit_layers, rules.rows_file is not None) == (layers, revision == "frequent")
        assert engine_options(model, {"exit_layer": layers[0]}, revision)


def test_exit_rows_are_those_of_the_revision(model: str, hub) -> None:
    """The other branch has none, and what was fetched of one is not taken for another."""
    rules = check_rules(model, {}, "frequent")
    (hub.place / "refs" / "moved").write_text((hub.place / "refs" / "main").read_text())
    config = hub.place / "snapshots" / (hub.place / "refs" / "main").read_text() / "config.json"
    config.unlink()
    block = MultiExit(exit_layers=(4, 8), rows=Path(rules.rows_file).stem)
    config.write_text(json.dumps(read_config(model, "frequent") | {"multi_exit": block.to_json()}))
    with pytest.raises(ExitServeError, match=r"no exit_rows/\w+\.safetensors .*'moved'"):
        check_rules(model, {}, "moved")


@pytest.mark.parametrize("revision", [None, "frequent"])
def test_jobs_of_commands(model: str, tmp_path: Path, revision: str | None) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n")
    layers = (6, 12, 18) if revision is None else (4, 8)
    more = [] if revision is None else ["--revision", revision]

    def parsed(*words: str) -> Any:
        return build_parser().parse_args([*words, *more, "--out", str(tmp_path / "out")])

    job = eval_job(parsed("eval", model, "--data", str(text)))
    assert (job.model, job.rules.exit_layers) == (model, layers)
    assert read_multi_exit(job.directory).exit_layers == layers
    job = bench_job(parsed("bench", model))
    assert (job.model_name, job.rules.exit_layers) == (model, layers)
    assert read_multi_exit(job.model_dir).exit_layers == layers
