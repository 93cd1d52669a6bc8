"""What the script for GPUs says of itself and of what it found; engines are played."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the script, which are no package."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> Any:
        return __import__(name)

    yield load
    for name in {path.stem for path in FOLDER.glob("*.py")} & set(sys.modules):
        del sys.modules[name]


def test_the_plan_has_three_calls_of_nine_minutes(script) -> None:
    lines = script("run").plan().splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["--call", name] for name in ("right", "fast", "kernels")
    ]
    for line in lines[:3]:
        minutes = re.search(r"at most ([\d.]+) minutes", line)
        assert minutes is not None and float(minutes[1]) <= 9
    assert re.search(r"the checkout \d+ MiB", lines[3])


def test_every_stage_is_in_one_call(script) -> None:
    run = script("run")
    assert sorted(run.STAGES) == sorted({*run.STAGES}) and len(run.STAGES) == 6
    assert set(run.CALLS) == set(run.CARRIES)


def test_the_verdict_is_ten_lines(script) -> None:
    run, outcome = script("run"), script("stages").StageOutcome
    good = outcome(verdict=["fine"])
    assert run.verdict({"branches": good}) == ["VERDICT: all is well", "branches: fine"]
    bad = outcome(failures=["it broke.\n" + "    a line\n" * 20])
    lines = run.verdict({"branches": good, "answers": bad})
    assert len(lines) == 10 and lines[0] == "VERDICT: FAILED: answers"
    assert lines[2] == "answers: it broke." and lines[-1] == "and 14 lines more, above"


def test_what_an_engine_says_in_its_log(script, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "INFO Using FLASH_ATTN attention backend out of potential backends\n"
        "INFO Estimated CUDA graph memory: 0.75 GiB total\n"
        "INFO Graph capturing finished in 3 secs, took 0.50 GiB\n"
    )
    expected = {"attention": "FLASH_ATTN", "planned_graph_gib": 0.75, "graph_gib": 0.5}
    assert script("child").told(log) == expected
    assert script("child").told(tmp_path / "none.log") == {}


@pytest.mark.parametrize(
    ("tokens", "depths", "share"),
    [
        ([[1, 2], [3, 4]], [[6, 2], [6, 4]], 1.0),
        ([[1, 2], [3, 5]], [[6, 2], [6, 4]], 0.75),
        ([[1, 2], [3, 4]], [[6, 2], [6, 6]], 0.75),
    ],
)
def test_answers_are_compared_with_their_depths(script, tokens, depths, share: float) -> None:
    right, passed = script("right"), script("child").Passed
    truth = passed(tokens=((1, 2), (3, 4)), times=(), depths=[(6, 2), (6, 4)])
    found = passed(tokens=tokens, times=(), depths=depths)
    assert right.same(found, truth) == share
    plain = passed(tokens=truth.tokens, times=())
    assert right.same(found, plain) == (1.0 if tokens[1][1] == 4 else 0.75)


def test_speeds_are_told_by_kind_and_batch(script) -> None:
    table, shape = script("engine_table"), script("shapes").TINY
    rows = [
        {"case": case, "engine": engine, "setting": setting, "batch": batch, "prompt_tokens": 16}
        | ({"speed": {"median": speed}} if speed else {})
        for case, engine, setting, batch, speed in (
            ("off", "exits", "exits off", 1, 0.99),
            ("all", "exits", "exit at 4", 1, 2.0),
            ("all", "exits", "exit at 4", 8, None),
            ("v", "verify", "verify 0.5", 8, 1.5),
        )
    ]
    assert table._verdict_lines(shape, rows) == [
        "tiny, all: 2.00 (1 x 16), failed (8 x 16)",
        "tiny, v: 1.50 (8 x 16)",
    ]


WAITS = (
    "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('found so far')"
)


def test_a_command_without_time_says_what_it_found(script, tmp_path: Path) -> None:
    class Run:
        folder = tmp_path

        def left(self, most: float) -> float:
            return most

    # Long enough for a Python to start on a busy machine.
    status, log = script("stages").command(Run(), "waits", ["-S", "-c", WAITS], most=6)
    assert status is None
    assert log.read_text().strip() == "found so far"


def test_a_pytorch_without_cuda_needs_no_if_nodes(script) -> None:
    before = vars(torch.cuda.CUDAGraph).copy()
    script("if_nodes").install()
    assert torch.version.cuda is not None or vars(torch.cuda.CUDAGraph) == before
