"""The report's keys, what is retained, and what a reader is warned of."""

from __future__ import annotations

import pytest

from exitserve.bench.measures import Measurements, Timing, case_of
from exitserve.bench.settings import PLAIN
from exitserve.costs import DecoderShape
from exitserve.evaluation.run import NOT_TIMED, least_retained, retention
from exitserve.evaluation.settings import label_of


def test_a_case_has_the_keys_of_a_benchmark(report, bundled) -> None:
    from exitserve.checkpoint import read_config
    from exitserve.costs import DecodeStep, shape_of

    shape: DecoderShape = shape_of(read_config(bundled), "float32")
    plain = Measurements(setting=PLAIN, batch_size=1, requests=1, depths=[12])
    plain.steps = [DecodeStep(depths=(12,), contexts=(4,), propagates=True)]
    plain.repeats = [Timing(tokens=1, seconds=1.0, gaps=(1.0,), arrivals=1)]
    theirs = case_of(plain, plain, shape, (3, 6, 9))
    for case in report()["cases"]:
        assert set(theirs) <= set(case)
        assert all(case[key] is None for key in NOT_TIMED)


def test_what_the_oracle_saw_is_in_the_case(report) -> None:
    full, early, deferred = report()["cases"]
    assert (full["mode"], full["exit_threshold"], full["agreement"]) == ("off", None, 1.0)
    assert early["exit_layers"] == {"3": 40, "6": 0, "12": 60}
    assert early["mean_depth"] == early["mean_layers_run"] == pytest.approx(8.4)
    assert early["depth_speedup"] == pytest.approx(12 / 8.4, abs=1e-4)
    assert early["agreement"] == 0.96
    assert early["thresholds"] == {"3": 0.5, "6": 0.5}
    assert deferred["mean_layers_run"] == 12
    assert deferred["mean_depth"] == pytest.approx(10.2)


def test_tasks_retain_a_share_of_full_depths_score(report) -> None:
    data = report(0.8, 0.6, 0.7)
    tasks = [case["tasks"]["my_task"] for case in data["cases"]]
    assert [task["retention"] for task in tasks] == [1.0, 0.75, 0.875]
    assert tasks[0]["metric"] == "exact_match,none"
    assert tasks[0]["mean_depth"] == 7.5
    assert tasks[0]["exit_layers"] == {"3": 25, "12": 25}
    assert data["minimum_retention"] == {
        "retention": 0.75,
        "task": "my_task",
        "mode": "confidence",
        "exit_threshold": 0.5,
    }


def test_where_less_is_better_the_inverse_is_retained() -> None:
    assert retention(2.0, 1.5, higher_is_better=False) == 0.75
    assert retention(1.5, 2.0, higher_is_better=True) == 0.75
    assert retention(0.5, 0.0, higher_is_better=True) is None
    assert least_retained([{"tasks": {}}, {"tasks": {}}]) is None


def test_a_reader_is_warned(report) -> None:
    assert report(0.8, 0.6, 0.7)["notes"] == []
    (too_few,) = report(0.8, 0.75, 0.8)["notes"]
    assert "too few samples (40)" in too_few
    (nothing,) = report(0.0, 0.0, 0.0)["notes"]
    assert "full depth's score is 0" in nothing
    (one_token,) = report(0.8, 0.6, 0.7, tokens=0)["notes"]
    assert "Nothing of this task can exit" in one_token


def test_labels() -> None:
    assert label_of("off", None) == "full depth"
    assert label_of("confidence", 0.5) == "threshold 0.5"
    assert label_of("defer", 0.5) == "defer 0.5"
    assert label_of("defer", "auto") == "defer auto"
