"""`GET /exitserve/stats`: totals since the start and over the last minute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine.recorder import Recorder
from exitserve.server.stats_window import WINDOW_SECONDS, StatsWindow

LAYERS = 6
EXITS = (2, 4)

DEPTHS = st.lists(st.integers(1, LAYERS), max_size=5)
# Steps of a server: seconds that pass, then the depths of the tokens generated meanwhile.
STEPS = st.lists(st.tuples(st.integers(1, 50), DEPTHS), max_size=20)


def window_of(
    steps: list[tuple[int, list[int]]], *, earlier: Sequence[int] = (), engines: int = 1
) -> tuple[StatsWindow, int]:
    """A window that was told of `steps`, and the time of the last.

    Args:
        steps: seconds that pass, then the depths of the tokens generated meanwhile.
        earlier: depths of tokens that were generated before the first reading.
        engines: that generate the tokens by turns.
    """
    recorders = [Recorder(LAYERS, EXITS) for _ in range(engines)]
    window, now, turns = StatsWindow(), 0, cycle(recorders)
    for seconds, depths in [(0, earlier), *steps]:
        now += seconds
        for depth, recorder in zip(depths, turns, strict=False):
            recorder.tokens_by_depth[depth] += 1
        window.add(now, {rank: one.snapshot() for rank, one in enumerate(recorders)})
    return window, now


def expected(depths: list[int]) -> dict[str, Any]:
    """The depth figures, from the definitions."""
    return {
        "tokens": len(depths),
        "mean_depth": sum(depths) / len(depths) if depths else None,
        "depth_speedup": LAYERS * len(depths) / sum(depths) if depths else None,
    }


@given(STEPS, DEPTHS, st.integers(1, 3))
def test_figures_follow_from_the_tokens(
    steps: list[tuple[int, list[int]]], earlier: list[int], engines: int
) -> None:
    window, now = window_of(steps, earlier=earlier, engines=engines)
    times = [0]
    for seconds, _ in steps:
        times.append(times[-1] + seconds)
    # The last minute counts from the newest sample that is a minute old, or else from the first.
    start = max([time for time in times if time <= now - WINDOW_SECONDS], default=0)
    lately = [
        depth
        for time, (_, depths) in zip(times[1:], steps, strict=True)
        if time > start
        for depth in depths
    ]
    report = window.report(now)
    everything = [*earlier, *(depth for _, depths in steps for depth in depths)]
    for part, depths in (("since_start", everything), ("last_minute", lately)):
        figures = report[part]
        assert {name: figures[name] for name in expected(depths)} == expected(depths)
        assert sum(figures["tokens_by_exit_layer"].values()) == figures["tokens"]
        for layer, count in figures["tokens_by_exit_layer"].items():
            assert count == depths.count(int(layer))


def test_traffic_leaves_the_last_minute_without_new_samples() -> None:
    window, now = window_of([(1, [2, 4, 6])])
    assert window.report(now)["last_minute"]["tokens"] == 3
    assert window.report(now + WINDOW_SECONDS + 1)["last_minute"]["tokens"] == 0
    assert window.report(now + WINDOW_SECONDS + 1)["since_start"]["tokens"] == 3


def test_exits_count_their_checks() -> None:
    window, recorder = StatsWindow(), Recorder(LAYERS, EXITS)
    recorder.count_checks(4, 10, 2)
    window.add(0.0, {0: recorder.snapshot()})
    exits = window.report(0.0)["since_start"]["exits"]
    assert exits["4"] == {"checks": 10, "checks_passed": 2}


@pytest.mark.parametrize("step", [0.001, 1.0])
def test_memory_is_bounded_and_no_token_is_lost(step: float) -> None:
    recorder, window = Recorder(LAYERS, EXITS), StatsWindow()
    count = 2000
    for index in range(count):
        recorder.tokens_by_depth[4] += 1
        window.add(index * step, {0: recorder.snapshot()})
    assert len(window._samples) <= 130
    assert window.report((count - 1) * step)["since_start"]["tokens"] == count
