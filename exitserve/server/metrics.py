"""Every Prometheus metric of the product, and the numbers of `GET /exitserve/stats`.

Both read the worker's cumulative snapshot (`exitserve.engine.recorder.Recorder.snapshot`).
A metric is one entry of `METRICS`; its PromQL line goes out with it in `/metrics`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

Snapshot = Mapping[str, Any]
"""What `Recorder.snapshot` returns; its layer keys may have become text on the way."""

Counts = dict[tuple[str, str], int]
"""Count by metric name and exit layer; the layer is empty where the metric has no such label."""

WINDOW_SECONDS = 60.0
"""The length of `last_minute`."""

MIN_SPACING_SECONDS = 0.5
"""Samples closer than this are merged, so that frequent requests for stats cost no memory."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One counter or gauge: what it means, and how it is read off a snapshot."""

    name: str
    help: str
    promql: str
    read: Callable[[Snapshot], dict[str, int]]
    per_exit_layer: bool = False
    is_gauge: bool = False
    """It may fall, and has no sum over time."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names, in the order in which values are given."""
        return ("model_name", "exit_layer") if self.per_exit_layer else ("model_name",)

    @property
    def documentation(self) -> str:
        """The help text that `/metrics` carries."""
        return f"{self.help} PromQL: {self.promql}"


def _by_layer(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(layer): count for layer, count in counts.items()}


def _tokens(snapshot: Snapshot) -> dict[str, int]:
    """Tokens by depth, with a zero wherever tokens can stop: series exist before any traffic."""
    stops = {str(layer) for layer in (*snapshot["exit_layers"], snapshot["num_layers"])}
    counts = _by_layer(snapshot["tokens_by_depth"])
    return {depth: n for depth, n in counts.items() if n or depth in stops}


def _saved_layers(snapshot: Snapshot) -> int:
    num_layers: int = snapshot["num_layers"]
    return sum((num_layers - int(d)) * n for d, n in snapshot["tokens_by_depth"].items())


def _full_depth_layers(snapshot: Snapshot) -> int:
    tokens: int = sum(snapshot["tokens_by_depth"].values())
    return int(snapshot["num_layers"]) * tokens


TOKENS = Metric(
    name="exitserve_tokens_total",
    help="Generated tokens by the depth at which they stopped; the last layer is full depth.",
    promql="sum by (exit_layer) (rate(exitserve_tokens_total[5m]))",
    per_exit_layer=True,
    read=_tokens,
)
CHECKS = Metric(
    name="exitserve_checks_total",
    help="Tokens whose confidence was checked at an exit layer.",
    promql="sum by (exit_layer) (rate(exitserve_checks_total[5m]))",
    per_exit_layer=True,
    read=lambda snapshot: _by_layer(snapshot["checks"]),
)
CHECKS_PASSED = Metric(
    name="exitserve_checks_passed_total",
    help="Tokens that passed the check of an exit layer, and so stopped (or were drafted) there.",
    promql=(
        "sum by (exit_layer) (rate(exitserve_checks_passed_total[5m]))"
        " / sum by (exit_layer) (rate(exitserve_checks_total[5m]))"
    ),
    per_exit_layer=True,
    read=lambda snapshot: _by_layer(snapshot["passed"]),
)
FROZEN_ROW_TOKENS = Metric(
    name="exitserve_frozen_row_tokens_total",
    help="Tokens whose row was frozen and whose remaining K/V was propagated.",
    promql=(
        "sum(rate(exitserve_frozen_row_tokens_total[5m])) / sum(rate(exitserve_tokens_total[5m]))"
    ),
    read=lambda snapshot: {"": snapshot["frozen_tokens"]},
)
DEFERRED_TOKENS = Metric(
    name="exitserve_deferred_tokens_total",
    help="Tokens (mode defer) that were emitted while their deeper layers were still to run.",
    promql=(
        "sum(rate(exitserve_deferred_tokens_total[5m])) / sum(rate(exitserve_tokens_total[5m]))"
    ),
    read=lambda snapshot: {"": snapshot["deferred_tokens"]},
)
DEFERRED_LAYERS = Metric(
    name="exitserve_deferred_layers_total",
    help="Layers that tokens ran after they were emitted (mode defer), or as rejected drafts.",
    promql="sum(rate(exitserve_deferred_layers_total[5m]))",
    read=lambda snapshot: {"": snapshot["deferred_layers"]},
)
PENDING_TOKENS = Metric(
    name="exitserve_pending_tokens",
    help="Tokens that wait at an exit layer for their deeper layers to run.",
    promql="sum(exitserve_pending_tokens)",
    read=lambda snapshot: {"": snapshot["pending_tokens"]},
    is_gauge=True,
)
FLUSHED_TOKENS = Metric(
    name="exitserve_flushed_tokens_total",
    help="Pending tokens (mode defer) that ran because a block was full, or too many waited.",
    promql=(
        "sum(rate(exitserve_flushed_tokens_total[5m]))"
        " / sum(rate(exitserve_deferred_tokens_total[5m]))"
    ),
    read=lambda snapshot: {"": snapshot["flushed_tokens"]},
)
STEPPED_ASIDE = Metric(
    name="exitserve_stepped_aside_total",
    help="Times that a request (mode verify) drafted nothing because drafting is slower now.",
    promql="sum(rate(exitserve_stepped_aside_total[5m]))",
    read=lambda snapshot: {"": snapshot["stepped_aside"]},
)
DEPTH_SAVED = Metric(
    name="exitserve_depth_saved_layers_total",
    help="Layers that generated tokens did without: the sum of L - depth.",
    promql="sum(rate(exitserve_depth_saved_layers_total[5m]))",
    read=lambda snapshot: {"": _saved_layers(snapshot)},
)
FULL_DEPTH = Metric(
    name="exitserve_full_depth_layers_total",
    help="Layers that generated tokens would have run at full depth: L for each token.",
    promql=(
        "sum(rate(exitserve_full_depth_layers_total[5m]))"
        " / (sum(rate(exitserve_full_depth_layers_total[5m]))"
        " - sum(rate(exitserve_depth_saved_layers_total[5m])))"
    ),
    read=lambda snapshot: {"": _full_depth_layers(snapshot)},
)
INVOLUNTARY_STAYS = Metric(
    name="exitserve_involuntary_stays_total",
    help="Confident rows that had to go on because of their batch; 0 unless something is wrong.",
    promql="sum(increase(exitserve_involuntary_stays_total[5m]))",
    read=lambda snapshot: {"": snapshot["involuntary_stays"]},
)

METRICS: tuple[Metric, ...] = (
    TOKENS,
    CHECKS,
    CHECKS_PASSED,
    FROZEN_ROW_TOKENS,
    DEFERRED_TOKENS,
    DEFERRED_LAYERS,
    PENDING_TOKENS,
    FLUSHED_TOKENS,
    STEPPED_ASIDE,
    DEPTH_SAVED,
    FULL_DEPTH,
    INVOLUNTARY_STAYS,
)
"""All of them: tests hold dashboards, alert rules and the documentation against this."""


def read_counts(snapshot: Snapshot) -> Counts:
    """Every counter's value in one snapshot."""
    return {
        (metric.name, layer): count
        for metric in METRICS
        if not metric.is_gauge
        for layer, count in metric.read(snapshot).items()
    }


def advance(last: Counts, current: Counts) -> Counts:
    """What happened between two readings of the same worker.

    A reading below the last one means that the worker began anew: all of it is then new.
    """
    restarted = any(current.get(key, 0) < count for key, count in last.items())
    base: Counts = {} if restarted else last
    return {key: count - base.get(key, 0) for key, count in current.items()}


class ExitMetrics:
    """The counters and gauges of one served model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        """Registers every metric; a registry takes them once."""
        self._model_name = model_name
        self._counters = {
            metric.name: Counter(
                metric.name, metric.documentation, metric.labels, registry=registry
            )
            for metric in METRICS
            if not metric.is_gauge
        }
        self._gauges = {
            metric: Gauge(metric.name, metric.documentation, metric.labels, registry=registry)
            for metric in METRICS
            if metric.is_gauge
        }
        self._last: Counts = {}

    def update(self, snapshot: Snapshot) -> None:
        """Advances the counters to a worker's cumulative counts, and sets the gauges."""
        for metric, gauge in self._gauges.items():
            for value in metric.read(snapshot).values():
                gauge.labels(self._model_name).set(value)
        current = read_counts(snapshot)
        for (name, layer), count in advance(self._last, current).items():
            labels = (self._model_name, layer) if layer else (self._model_name,)
            self._counters[name].labels(*labels).inc(count)
        self._last = current


class StatsWindow:
    """Totals since the start, and over the last minute, from snapshots taken now and then."""

    def __init__(self) -> None:
        """Starts without samples: every report is zero until the first."""
        self._last: Counts = {}
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, snapshot: Snapshot) -> None:
        """Adds a worker's cumulative counts at time `now`, in seconds of a monotonic clock."""
        current = read_counts(snapshot)
        total = self._total()
        for key, count in advance(self._last, current).items():
            total[key] = total.get(key, 0) + count
        self._last = current
        if len(self._samples) > 1 and now - self._samples[-2][0] < MIN_SPACING_SECONDS:
            self._samples.pop()
        self._samples.append((now, total))
        self._forget(now)

    def report(self, now: float) -> dict[str, Any]:
        """The body of `GET /exitserve/stats`.

        Returns:
            `since_start` and `last_minute`, each with `tokens`, `tokens_by_exit_layer`,
            `mean_depth`, `depth_speedup`, `mean_layers_run` (with those that mode "defer" runs
            later, and those of rejected drafts), `checks` and `checks_passed`. What is an average
            is None where no token was
            generated.
        """
        self._forget(now)
        total = self._total()
        before = self._samples[0][1] if self._samples else {}
        lately = {key: count - before.get(key, 0) for key, count in total.items()}
        return {"since_start": _summary(total), "last_minute": _summary(lately)}

    def _total(self) -> Counts:
        return dict(self._samples[-1][1]) if self._samples else {}

    def _forget(self, now: float) -> None:
        # The newest sample that is a minute old stays: the last minute is counted from it.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()


def _summary(counts: Counts) -> dict[str, Any]:
    def total(metric: Metric) -> int:
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
    }
