"""Hub ids: commands read the revision that was asked for, in all of its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from exitserve.bench.command import job_of as bench_job
from exitserve.checkpoint.block import MultiExit, read_config, read_multi_exit, write_multi_exit
from exitserve.cli import build_parser
from exitserve.engine.launch import check_rules, engine_options
from exitserve.errors import ExitServeError
from exitserve.evaluation.command import job_of as eval_job
from exitserve.screens import KNOTS, Screen, save_screens


@pytest.fixture
def model(hub, bundled: Path, tmp_path: Path) -> str:
    """Exits 6, 12, 18 on the default branch; on another, exits 4 and 8 with screens."""
    hub.publish(bundled)
    other = tmp_path / "other"
    shutil.copytree(bundled, other)
    size = read_config(other)["hidden_size"]
    meaning = torch.ones(len(KNOTS))
    own = Screen(
        torch.ones(2, size), torch.zeros(2), torch.ones(2), torch.zeros(1), meaning, meaning
    )
    name = save_screens(other, {4: own, 8: own})
    write_multi_exit(other, MultiExit(exit_layers=(4, 8), screens=name))
    hub.publish(other, "screened")
    return str(hub.model)


def test_each_revision_has_its_exits(model: str) -> None:
    for revision, layers in ((None, (6, 12, 18)), ("main", (6, 12, 18)), ("screened", (4, 8))):
        block = read_multi_exit(model, revision)
        assert block is not None and block.exit_layers == layers
        rules = check_rules(model, {}, revision)
        assert (rules.exit_layers, rules.screens_file is not None) == (
            layers,
            revision == "screened",
        )
        assert engine_options(model, {"exit_layer": layers[0]}, revision)


def test_screens_are_those_of_the_revision(model: str, hub) -> None:
    """The other branch has none, and what was fetched of one is not taken for another."""
    rules = check_rules(model, {}, "screened")
    (hub.place / "refs" / "moved").write_text((hub.place / "refs" / "main").read_text())
    config = hub.place / "snapshots" / (hub.place / "refs" / "main").read_text() / "config.json"
    config.unlink()
    block = MultiExit(exit_layers=(4, 8), screens=Path(rules.screens_file).stem)
    config.write_text(json.dumps(read_config(model, "screened") | {"multi_exit": block.to_json()}))
    with pytest.raises(ExitServeError, match=r"no exit_screens/\w+\.safetensors .*'moved'"):
        check_rules(model, {}, "moved")


@pytest.mark.parametrize("revision", [None, "screened"])
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
