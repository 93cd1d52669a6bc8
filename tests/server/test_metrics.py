"""The counters on /metrics follow the worker's counts and never go back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from exitserve.engine.recorder import Recorder
from exitserve.server.metrics import (
    METRICS,
    ShadowMetrics,
    WorkerMetrics,
    export_calibrated_agreement,
)

LAYERS = 6
EXITS = (2, 4)
MODEL = "tiny"

# One event: a token stops somewhere, a check is made, or the worker starts anew.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), st.integers(1, LAYERS)),
        st.tuples(st.just("check"), st.sampled_from(EXITS), st.integers(1, 8), st.integers(0, 8)),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


def play(event: tuple[Any, ...], recorder: Recorder) -> Recorder:
    """Applies one event; a restart gives a new recorder."""
    match event:
        case ("token", depth):
            recorder.tokens_by_depth[depth] += 1
        case ("check", layer, checks, passed):
            recorder.count_checks(layer, checks, min(checks, passed))
            recorder.frozen_tokens += min(checks, passed)
        case ("restart",):
            return Recorder(LAYERS, EXITS)
    return recorder


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Counter values by name and exit layer, without the creation times."""
    return {
        (sample.name, sample.labels.get("exit_layer", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def total(values: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (metric, _), value in values.items() if metric == name)


@given(EVENTS)
def test_counters_never_decrease_and_reconcile(events: list[tuple[Any, ...]]) -> None:
    registry, recorder = CollectorRegistry(), Recorder(LAYERS, EXITS)
    metrics = WorkerMetrics(registry, MODEL)
    before = samples(registry)
    depths: list[int] = []
    for event in events:
        recorder = play(event, recorder)
        depths += [event[1]] if event[0] == "token" else []
        metrics.update(recorder.snapshot())
        after = samples(registry)
        assert all(after[key] >= value for key, value in before.items())
        before = after
    assert total(before, "exitserve_tokens_total") == len(depths)
    assert total(before, "exitserve_full_depth_layers_total") == LAYERS * len(depths)
    saved = LAYERS * len(depths) - sum(depths)
    assert total(before, "exitserve_depth_saved_layers_total") == saved
    passed = total(before, "exitserve_checks_passed_total")
    assert total(before, "exitserve_frozen_row_tokens_total") == passed
    assert total(before, "exitserve_checks_total") >= passed


def test_every_place_a_token_can_stop_has_a_series_before_any_traffic() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, MODEL).update(Recorder(LAYERS, EXITS).snapshot())
    layers = {layer for name, layer in samples(registry) if name == "exitserve_tokens_total"}
    assert layers == {"2", "4", "6"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_is_exported_with_its_promql(metric: Any) -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, MODEL).update(Recorder(LAYERS, EXITS).snapshot())
    ShadowMetrics(registry, MODEL, (*EXITS, LAYERS))
    export_calibrated_agreement(registry, MODEL, 0.0)
    text = generate_latest(registry).decode()
    assert f"# HELP {metric.name} {metric.documentation}" in text
    assert metric.name in metric.promql
    labels = re.search(rf"^{metric.name}\{{(.*?)\}} 0\.0$", text, flags=re.MULTILINE)
    assert labels, f"no sample of {metric.name}"
    names = {part.split("=")[0] for part in labels[1].split(",")}
    assert names == set(metric.labels)
