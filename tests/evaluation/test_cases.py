"""The report's keys, and what the oracle saw."""

from __future__ import annotations

import pytest

from exitserve.bench.measures import Measurements, Timing, case_of
from exitserve.bench.settings import PLAIN
from exitserve.costs import DecoderShape
from exitserve.evaluation.run import NOT_TIMED
from exitserve.evaluation.settings import label_of


def test_a_case_has_the_keys_of_a_benchmark(report, bundled) -> None:
    from exitserve.checkpoint import read_config
    from exitserve.costs import DecodeStep, shape_of

    shape: DecoderShape = shape_of(read_config(bundled), "float32")
    plain = Measurements(setting=PLAIN, batch_size=1, requests=1, depths=[12])
    plain.steps = [DecodeStep(depths=(12,), contexts=(4,), propagates=True)]
    plain.repeats = [Timing(tokens=1, seconds=1.0, gaps=(1.0,), arrivals=1)]
    theirs = case_of(plain, plain, shape, (3, 6, 9))
    for case in report["cases"]:
        assert set(theirs) <= set(case)
        assert all(case[key] is None for key in NOT_TIMED)


def test_what_the_oracle_saw_is_in_the_case(report) -> None:
    full, early, deferred = report["cases"]
    assert (full["mode"], full["exit_threshold"], full["agreement"]) == ("off", None, 1.0)
    assert early["exit_layers"] == {"3": 40, "6": 0, "12": 60}
    assert early["mean_depth"] == early["mean_layers_run"] == pytest.approx(8.4)
    assert early["depth_speedup"] == pytest.approx(12 / 8.4, abs=1e-4)
    assert early["agreement"] == 0.96
    assert early["thresholds"] == {"3": 0.5, "6": 0.5}
    assert deferred["mean_layers_run"] == 12
    assert deferred["mean_depth"] == pytest.approx(10.2)


def test_labels() -> None:
    assert label_of("off", None) == "full depth"
    assert label_of("confidence", 0.5) == "threshold 0.5"
    assert label_of("defer", 0.5) == "defer 0.5"
    assert label_of("defer", "auto") == "defer auto"
