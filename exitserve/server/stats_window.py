"""The numbers of `GET /exitserve/stats`: totals since the start and over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from exitserve.server.metrics import (
    ACCEPTED,
    CHECKS,
    CHECKS_PASSED,
    DEFERRED_LAYERS,
    DEPTH_SAVED,
    DRAFTED,
    FULL_DEPTH,
    TOKENS,
    Counts,
    Snapshot,
    WorkerMetric,
    advance,
    read_counts,
)

WINDOW_SECONDS = 60.0
"""The length of `last_minute`."""

MIN_SPACING_SECONDS = 0.5
"""Samples closer than this are merged, to bound memory when stats are requested often."""


class StatsWindow:
    """Totals since the start and over the last minute, from occasional snapshots."""

    def __init__(self) -> None:
        """Starts without samples: all counts are zero until the first."""
        self._last: dict[int, Counts] = {}
        """By engine."""
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, snapshots: Mapping[int, Snapshot]) -> None:
        """Adds a reading: one sample of all engines together."""
        total = self._total()
        for engine, snapshot in snapshots.items():
            current = read_counts(snapshot)
            for key, count in advance(self._last.get(engine, {}), current).items():
                total[key] = total.get(key, 0) + count
            self._last[engine] = current
        if len(self._samples) > 1 and now - self._samples[-2][0] < MIN_SPACING_SECONDS:
            self._samples.pop()
        self._samples.append((now, total))
        self._forget(now)

    def report(self, now: float) -> dict[str, Any]:
        """The body of `GET /exitserve/stats`.

        Returns:
            `since_start` and `last_minute`, each with `tokens`, `tokens_by_exit_layer`,
            `mean_depth`, `depth_speedup`, `mean_layers_run` (with the layers that mode "defer" runs
            later, and those of rejected drafts), `checks` and `checks_passed`, `drafted_tokens`,
            `accepted_tokens` and what of these was of the text, and `exits`, the checks by exit
            layer. Averages are None if no token was generated.
        """
        self._forget(now)
        total = self._total()
        before = self._samples[0][1] if self._samples else {}
        lately = {key: count - before.get(key, 0) for key, count in total.items()}
        periods = {"since_start": total, "last_minute": lately}
        return {
            name: {**_summary(counts), "exits": _exits(counts)} for name, counts in periods.items()
        }

    def _total(self) -> Counts:
        return dict(self._samples[-1][1]) if self._samples else {}

    def _forget(self, now: float) -> None:
        # Keep the newest sample that is a minute old: the last minute starts there.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()


def _exits(counts: Counts) -> dict[str, Any]:
    """The checks by exit layer."""
    kinds = {"checks": CHECKS.name, "checks_passed": CHECKS_PASSED.name}
    return {
        str(layer): {kind: counts.get((name, str(layer)), 0) for kind, name in kinds.items()}
        for layer in sorted({int(layer) for name, layer in counts if name == CHECKS.name})
    }


def _summary(counts: Counts) -> dict[str, Any]:
    def total(metric: WorkerMetric) -> int:
        return sum(count for (name, _), count in counts.items() if name == metric.name)

    tokens, full_depth = total(TOKENS), total(FULL_DEPTH)
    run = full_depth - total(DEPTH_SAVED)
    by_layer = {int(layer): n for (name, layer), n in counts.items() if name == TOKENS.name}
    return {
        "tokens": tokens,
        "tokens_by_exit_layer": {str(layer): by_layer[layer] for layer in sorted(by_layer)},
        "mean_depth": run / tokens if tokens else None,
        "depth_speedup": full_depth / run if tokens else None,
        "mean_layers_run": (run + total(DEFERRED_LAYERS)) / tokens if tokens else None,
        "checks": total(CHECKS),
        "checks_passed": total(CHECKS_PASSED),
        "drafted_tokens": total(DRAFTED),
        "accepted_tokens": total(ACCEPTED),
        "drafted_from_text": counts.get((DRAFTED.name, "text"), 0),
        "accepted_from_text": counts.get((ACCEPTED.name, "text"), 0),
    }
