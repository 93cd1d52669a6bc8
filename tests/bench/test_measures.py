"""Statistics, cases and pages of a comparison, from made-up passes."""

from __future__ import annotations

from typing import Any

import pytest

from exitserve.bench.measures import (
    DRAFTS,
    Measurements,
    Timing,
    case_of,
    notes_on,
    steps_of,
    timing_of,
)
from exitserve.costs.byte_costs import DecodeStep
from exitserve.errors import ExitServeError
from exitserve.settings import OFF, PLAIN, Setting

from ..shapes import TINY_DECODER as SHAPE

CASE_KEYS = {
    "batch_size",
    "mode",
    "rival",
    "exit_threshold",
    "exit_layer",
    "tokens_per_second",
    "tpot_ms",
    "tokens_at_once",
    "mean_depth",
    "mean_layers_run",
    "depth_speedup",
    "wall_speedup",
    "load_wall_speedup",
    "limit_speedup",
    "efficiency",
    "agreement",
    "perplexity",
    *DRAFTS,
    "exit_layers",
}


def observed(setting: Setting, rates: list[float], depths: list[int], checks: int) -> Measurements:
    """Ten tokens a repeat at the given rates, one request."""
    return Measurements(
        setting=setting,
        batch_size=1,
        requests=10,
        depths=depths,
        steps=[DecodeStep(depths=(depth,), contexts=(5,), checks=checks) for depth in depths],
        repeats=[Timing(10, 10 / rate, (1 / rate,) * 10, arrivals=10) for rate in rates],
    )


def test_decoding_is_timed_while_the_batch_is_full() -> None:
    """The early request's first two tokens came while the other's prompt was being processed,
    and the late one's last when the early one had ended."""
    timing = timing_of([[0.0, 0.5, 1.5, 2.0], [1.0, 1.5, 2.0, 2.25]])
    assert timing.tokens == 4
    assert timing.seconds == 1.0
    assert timing.gaps == (1.0, 0.5, 0.5, 0.5)


def test_tokens_of_one_moment_share_its_gap() -> None:
    timing = timing_of([[0.0, 1.5, 1.5, 1.5, 2.0]])
    assert timing.gaps == (0.5, 0.5, 0.5, 0.5)
    assert timing.arrivals == 2


@pytest.mark.parametrize("times", [[[1.0]], [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]])
def test_a_batch_that_was_never_full_cannot_be_timed(times: list[list[float]]) -> None:
    with pytest.raises(ExitServeError, match="--max-tokens"):
        timing_of(times)


def test_steps_line_up_the_rows_of_a_batch() -> None:
    assert steps_of([(2, 4), (2, 2)], prompt_lengths=[7, 9]) == [
        DecodeStep(depths=(2, 2), contexts=(8, 10)),
        DecodeStep(depths=(4, 2), contexts=(9, 11)),
    ]


def test_the_limit_counts_the_checks_that_were_made() -> None:
    plain = observed(PLAIN, [100.0], [4, 4], checks=0)
    some, none = (observed(OFF, [100.0], [4, 4], checks=0) for _ in range(2))
    some.checks = 2
    limits = [case_of(seen, plain, SHAPE, (1, 2))["limit_speedup"] for seen in (some, none)]
    assert limits[0] < limits[1] == 1.0


def test_a_case_has_the_documented_keys_and_adds_up() -> None:
    plain = observed(PLAIN, [100.0, 50.0, 80.0], [4, 4, 4, 4], checks=0)
    fixed = observed(
        Setting(mode="fixed", exit_layer=2), [150.0, 90.0, 120.0], [2, 2, 2, 4], checks=1
    )
    case = case_of(fixed, plain, SHAPE, (1, 2))
    assert case.keys() == CASE_KEYS
    # Within repeats: 1.5, 1.8, 1.5; the median of rates over the median of rates would agree
    # here only by accident, and the spread would be lost.
    assert case["wall_speedup"] == {"median": 1.5, "min": 1.5, "max": 1.8}
    assert case["load_wall_speedup"] is None, "nothing was measured under load"
    assert case["tokens_per_second"] == 120.0
    assert case["tpot_ms"]["median"] == pytest.approx(1e3 / 120, abs=1e-3)
    assert case["exit_layers"] == {"1": 0, "2": 3, "4": 1}
    assert case["mean_depth"] == 2.5
    assert case["depth_speedup"] == 1.6
    assert case["efficiency"] == pytest.approx(1.5 / case["limit_speedup"], abs=1e-3)
    assert case["agreement"] is None


def test_drafts_that_are_rejected_count_as_layers_run() -> None:
    verify = Setting(mode="verify", exit_threshold=0.5)
    seen = observed(verify, [100.0], [4, 4], checks=0)
    seen.layers_later, seen.drafts = 4, dict(zip(DRAFTS, (2, 1, 0, 0), strict=True))
    case = case_of(seen, observed(PLAIN, [100.0], [4, 4], checks=0), SHAPE, (2,))
    assert (case["mean_depth"], case["mean_layers_run"]) == (4.0, 6.0)
    assert (case["drafted"], case["accepted"], case["depth_speedup"]) == (2, 1, 1.0)


def test_the_limit_of_verify_is_what_was_read() -> None:
    """Two tokens by the layers of one, and a head for the check and one for the judge."""
    plain = observed(PLAIN, [100.0], [4, 4], checks=0)
    seen = observed(Setting(mode="verify", exit_threshold=0.5), [100.0], [4, 4], checks=1)
    limits = []
    for layers, heads, checks in ((2, 1, 0), (4, 1, 0), (4, 1, 0.5)):
        seen.reads = [
            {"layers": layers + more, "checks": checks, "heads": heads} for more in (-1, 1)
        ]  # two repeats
        limits.append(case_of(seen, plain, SHAPE, (2,))["limit_speedup"])
    assert limits[0] > limits[1] == 1.0 > limits[2]


def noted(*repeats: list[float]) -> tuple[list[str], list[dict[str, Any]]]:
    """What is said of exits off at these rates beside a steady 100 of plain vLLM."""
    plain = observed(PLAIN, [100.0, 100.0], [4, 4], checks=0)
    seen = [observed(OFF, rates, [4, 4], checks=0) for rates in repeats]
    cases = [case_of(one, plain, SHAPE, (1, 2)) for one in seen]
    return notes_on(cases), cases


def test_a_result_above_the_limit_is_flagged_unless_shorter_calls_explain_it() -> None:
    assert noted([109.0, 120.0])[0] == []
    (note,), cases = noted([109.0, 120.0], [111.0, 150.0])
    assert "above the limit: check the measurement" in note
    (several,) = notes_on([case | {"tokens_at_once": 5.0} for case in cases])
    assert "several tokens, which share" in several


def test_repeats_that_differ_widely_are_flagged_together() -> None:
    (note,), _ = noted([80.0, 120.0], [80.0, 120.0])
    assert "exits off at batch 1 (0.80 to 1.20)" in note


def test_exits_off_that_is_slower_in_every_repeat_is_flagged() -> None:
    assert noted([90.0, 99.0])[0] == []
    assert "for the same work" in noted([90.0, 99.0], [85.0, 90.0])[0][0]
