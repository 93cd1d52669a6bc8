"""Every Prometheus metric of the product.

Most read the worker's cumulative snapshot (`exitserve.engine.recorder.Recorder.snapshot`). Those
of live quality are counted in the API process (`exitserve.server.shadow_evaluation`). Each metric
is an entry of `METRICS`; its help text on `/metrics` includes its PromQL query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

Snapshot = Mapping[str, Any]
"""What `Recorder.snapshot` returns; transport may have turned its layer keys into text."""

Counts = dict[tuple[str, str], int]
"""Count by metric name and exit layer, which is empty for metrics without that label."""

Thresholds = Literal["calibrated", "other"]
"""Whether a request has the thresholds of the calibration, to which its promise applies."""
DropReason = Literal["queue_full", "no_trace", "error"]
"""Why a selected request was not compared: a full queue, missing depths, or an error."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One counter or gauge."""

    name: str
    help: str
    promql: str
    by: tuple[str, ...] = ()
    """Labels in addition to the model's name."""
    is_gauge: bool = False
    """It may decrease, and is not summed over time."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names, in the order of their values."""
        return ("model_name", *self.by)

    @property
    def documentation(self) -> str:
        """The help text on `/metrics`."""
        return f"{self.help} PromQL: {self.promql}"

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Registers it as a counter; possible once for each registry."""
        return Counter(self.name, self.documentation, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """Registers it as a gauge; possible once for each registry."""
        # Of several API processes, the one that set it last.
        return Gauge(
            self.name,
            self.documentation,
            self.labels,
            registry=registry,
            multiprocess_mode="mostrecent",
        )


@dataclass(frozen=True, kw_only=True)
class WorkerMetric(Metric):
    """A metric that is read from the worker's snapshot."""

    @property
    def labels(self) -> tuple[str, ...]:
        """As vLLM labels its own: by model, and by the engine's data-parallel rank."""
        return ("model_name", "engine", *self.by)

    read: Callable[[Snapshot], dict[str, int]]
    """Value by exit layer, or under "" for metrics without that label."""


def _by_layer(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(layer): count for layer, count in counts.items()}


def _tokens(snapshot: Snapshot) -> dict[str, int]:
    """Tokens by depth, with zeros where tokens can stop: series exist before any traffic."""
    stops = {str(layer) for layer in (*snapshot["exit_layers"], snapshot["num_layers"])}
    counts = _by_layer(snapshot["tokens_by_depth"])
    return {depth: n for depth, n in counts.items() if n or depth in stops}


def _field(name: str) -> Callable[[Snapshot], dict[str, int]]:
    """Reads one count of the snapshot, for metrics without a layer."""
    return lambda snapshot: {"": snapshot[name]}


def _by_source(what: str) -> Callable[[Snapshot], dict[str, int]]:
    """Reads how many drafts there were of the text, and of the first layers."""

    def read(snapshot: Snapshot) -> dict[str, int]:
        text: int = snapshot[f"{what}_from_text"]
        return {"text": text, "layers": snapshot[f"{what}_tokens"] - text}

    return read


def _saved_layers(snapshot: Snapshot) -> int:
    num_layers: int = snapshot["num_layers"]
    return sum((num_layers - int(d)) * n for d, n in snapshot["tokens_by_depth"].items())


TOKENS = WorkerMetric(
    name="exitserve_tokens_total",
    help="Generated tokens by the depth at which they stopped; the last layer is full depth.",
    promql="sum by (exit_layer) (rate(exitserve_tokens_total[5m]))",
    by=("exit_layer",),
    read=_tokens,
)
CHECKS = WorkerMetric(
    name="exitserve_checks_total",
    help="Tokens whose confidence was checked at an exit layer.",
    promql="sum by (exit_layer) (rate(exitserve_checks_total[5m]))",
    by=("exit_layer",),
    read=lambda snapshot: _by_layer(snapshot["checks"]),
)
CHECKS_PASSED = WorkerMetric(
    name="exitserve_checks_passed_total",
    help="Tokens that passed the check of an exit layer, and stopped (or were drafted) there.",
    promql=(
        "sum by (exit_layer) (rate(exitserve_checks_passed_total[5m]))"
        " / sum by (exit_layer) (rate(exitserve_checks_total[5m]))"
    ),
    by=("exit_layer",),
    read=lambda snapshot: _by_layer(snapshot["passed"]),
)
FROZEN_ROW_TOKENS = WorkerMetric(
    name="exitserve_frozen_row_tokens_total",
    help="Tokens whose row was frozen and whose remaining K/V was propagated.",
    promql=(
        "sum(rate(exitserve_frozen_row_tokens_total[5m])) / sum(rate(exitserve_tokens_total[5m]))"
    ),
    read=_field("frozen_tokens"),
)
DEFERRED_LAYERS = WorkerMetric(
    name="exitserve_deferred_layers_total",
    help=(
        "Layers run for tokens beyond the depth at which they stopped (mode defer), or for "
        "rejected drafts."
    ),
    promql="sum(rate(exitserve_deferred_layers_total[5m]))",
    read=_field("deferred_layers"),
)
DRAFTED = WorkerMetric(
    name="exitserve_drafted_tokens_total",
    help="Drafts that were judged, by where they came from: the text, or the first layers.",
    promql="sum by (source) (rate(exitserve_drafted_tokens_total[5m]))",
    by=("source",),
    read=_by_source("drafted"),
)
ACCEPTED = WorkerMetric(
    name="exitserve_accepted_tokens_total",
    help="Drafts that were accepted, by where they came from.",
    promql=(
        "sum by (source) (rate(exitserve_accepted_tokens_total[5m]))"
        " / sum by (source) (rate(exitserve_drafted_tokens_total[5m]))"
    ),
    by=("source",),
    read=_by_source("accepted"),
)
DEPTH_SAVED = WorkerMetric(
    name="exitserve_depth_saved_layers_total",
    help="Layers above the depth at which tokens stopped (mode defer still runs them).",
    promql="sum(rate(exitserve_depth_saved_layers_total[5m]))",
    read=lambda snapshot: {"": _saved_layers(snapshot)},
)
FULL_DEPTH = WorkerMetric(
    name="exitserve_full_depth_layers_total",
    help="Layers that generated tokens would have run at full depth: L for each token.",
    promql=(
        "sum(rate(exitserve_full_depth_layers_total[5m]))"
        " / (sum(rate(exitserve_full_depth_layers_total[5m]))"
        " - sum(rate(exitserve_depth_saved_layers_total[5m])))"
    ),
    read=lambda snapshot: {"": snapshot["num_layers"] * sum(snapshot["tokens_by_depth"].values())},
)

SHADOW_TOKENS = Metric(
    name="exitserve_shadow_tokens_total",
    help="Tokens compared with full depth afterwards (--shadow-rate), by their depth.",
    promql="sum by (exit_layer) (rate(exitserve_shadow_tokens_total[1h]))",
    by=("exit_layer", "thresholds"),
)
SHADOW_AGREED = Metric(
    name="exitserve_shadow_agreed_total",
    help="Compared tokens whose depth and full depth have the same most likely token.",
    promql=(
        "sum(rate(exitserve_shadow_agreed_total[1h]))"
        " / sum(rate(exitserve_shadow_tokens_total[1h]))"
    ),
    by=("exit_layer", "thresholds"),
)
SHADOW_DROPPED = Metric(
    name="exitserve_shadow_dropped_total",
    help="Requests that were selected for comparison and not compared, by reason.",
    promql="sum by (reason) (increase(exitserve_shadow_dropped_total[1h]))",
    by=("reason",),
)
CALIBRATED_AGREEMENT = Metric(
    name="exitserve_calibrated_agreement",
    help="The share of tokens equal to full depth's that the checkpoint's calibration promises.",
    promql="max by (model_name) (exitserve_calibrated_agreement)",
    is_gauge=True,
)

WORKER_METRICS: tuple[WorkerMetric, ...] = (
    TOKENS,
    CHECKS,
    CHECKS_PASSED,
    FROZEN_ROW_TOKENS,
    DEFERRED_LAYERS,
    DRAFTED,
    ACCEPTED,
    DEPTH_SAVED,
    FULL_DEPTH,
)
METRICS: tuple[Metric, ...] = (
    *WORKER_METRICS,
    SHADOW_TOKENS,
    SHADOW_AGREED,
    SHADOW_DROPPED,
    CALIBRATED_AGREEMENT,
)
"""All metrics: tests compare dashboards, alert rules and documentation with this list."""


def read_counts(snapshot: Snapshot) -> Counts:
    """Every counter's value in one snapshot."""
    return {
        (metric.name, layer): count
        for metric in WORKER_METRICS
        for layer, count in metric.read(snapshot).items()
    }


def advance(last: Counts, current: Counts) -> Counts:
    """The increase between two readings of a worker.

    A reading below the last one means that the worker was restarted: then all of it is new.
    """
    restarted = any(current.get(key, 0) < count for key, count in last.items())
    base: Counts = {} if restarted else last
    return {key: count - base.get(key, 0) for key, count in current.items()}


class WorkerMetrics:
    """The counters of one served model that are read from its engines' workers."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        """Registers the metrics; possible once for each registry."""
        self._model_name = model_name
        self._counters = {metric.name: metric.counter(registry) for metric in WORKER_METRICS}
        self._last: dict[int, Counts] = {}
        """By engine."""

    def update(self, snapshot: Snapshot, engine: int = 0) -> None:
        """Raises the counters to a worker's cumulative counts."""
        whose = (self._model_name, str(engine))
        current = read_counts(snapshot)
        for (name, layer), count in advance(self._last.get(engine, {}), current).items():
            labels = (*whose, layer) if layer else whose
            self._counters[name].labels(*labels).inc(count)
        self._last[engine] = current


class ShadowMetrics:
    """The counters of live quality of one served model."""

    def __init__(self, registry: CollectorRegistry, model_name: str, depths: Iterable[int]) -> None:
        """Registers them, with zeros for the `depths` at which tokens can stop."""
        self._model_name = model_name
        self._tokens = SHADOW_TOKENS.counter(registry)
        self._agreed = SHADOW_AGREED.counter(registry)
        self._dropped = SHADOW_DROPPED.counter(registry)
        for depth in depths:
            for thresholds in get_args(Thresholds):
                self.compared(depth, thresholds, tokens=0, agreed=0)
        for reason in get_args(DropReason):
            self.dropped(reason, 0)

    def compared(self, depth: int, thresholds: Thresholds, *, tokens: int, agreed: int) -> None:
        """Counts tokens that stopped at `depth`, and those that agree with full depth."""
        labels = (self._model_name, str(depth), thresholds)
        self._tokens.labels(*labels).inc(tokens)
        self._agreed.labels(*labels).inc(agreed)

    def dropped(self, reason: DropReason, requests: int = 1) -> None:
        """Counts requests that were selected and not compared."""
        self._dropped.labels(self._model_name, reason).inc(requests)


def export_calibrated_agreement(
    registry: CollectorRegistry, model_name: str, agreement: float
) -> None:
    """Exports the agreement that the checkpoint's calibration promises; possible once."""
    CALIBRATED_AGREEMENT.gauge(registry).labels(model_name).set(agreement)
