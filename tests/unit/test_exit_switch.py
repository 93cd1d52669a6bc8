"""Which exits are on, from counts and costs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.engine import exit_switch
from exitserve.engine.exit_switch import KINDS, PASSES, RETRY, ExitSwitch
from exitserve.engine.recorder import Recorder
from exitserve.policy import NEVER, ExitPolicy, ExitRules
from exitserve.step_costs.curves import Curve, StepCosts

LAYERS, EXITS = 24, (6, 12, 18)


def line(first: float, more: float) -> Curve:
    """Milliseconds for one row, and for each further one."""
    return Curve(tuple((rows, (first + (rows - 1) * more) / 1e3) for rows in (1, 4, 16)))


COSTS = StepCosts(
    num_layers=LAYERS,
    matrices=line(0.1, 0.003),
    attention=line(0.0, 0.0),
    fill=line(0.01, 0.0),
    check=line(0.15, 0.01),
    head=line(0.1, 0.005),
    rest=line(1.4, 0.06),
    exits=line(0.25, 0.05),
)
"""As of the bundled model."""


DEAR = replace(COSTS, matrices=line(6.0, 0.05), head=line(3.0, 0.0), check=line(3.0, 0.0))


def make_switch(costs: StepCosts | None = COSTS, **rules: Any) -> ExitSwitch:
    rules = {"switches_exits": True, **rules}
    made = ExitRules(num_layers=LAYERS, exit_layers=EXITS, **rules)
    switch = ExitSwitch(made, Recorder(LAYERS, EXITS))
    switch.costs = costs
    return switch


def serve(
    switch: ExitSwitch,
    policy: ExitPolicy,
    shares: dict[int, float],
    rows: int,
    *,
    drafts: bool,
    samples: bool = False,
    answer: int = 100,
) -> ExitPolicy:
    """Several requests at a time, of which such shares of the tokens exit, for a while; with
    `answer` tokens each.

    Returns:
        The policy of a request that begins then.
    """
    for _ in range(400 // answer):
        begun = [switch.begin(policy, drafts=drafts, samples=samples) for _ in range(rows)]
        for token in range(answer):
            switch.note_pass(rows)
            for _, evidence in begun:
                if evidence is not None:
                    evidence.note_token(depth_at(shares, token / answer))
    return switch.begin(policy, drafts=drafts, samples=samples)[0]


def depth_at(shares: dict[int, float], place: float) -> int:
    for layer, share in shares.items():
        place -= share
        if place < 0:
            return layer
    return LAYERS


CONFIDENCE = ExitPolicy.confidence(0.7)
DEFER = ExitPolicy.confidence(0.7, mode="defer")
OFTEN = {6: 0.5, 12: 0.2, 18: 0.1}
SELDOM = {6: 0.05, 12: 0.05, 18: 0.02}


@pytest.mark.parametrize("policy", [CONFIDENCE, DEFER])
@pytest.mark.parametrize("drafts", [False, True])
def test_exits_are_on_where_they_pay(policy: ExitPolicy, drafts: bool) -> None:
    switch = make_switch(num_drafts=8 * drafts)
    assert serve(switch, policy, OFTEN, 1, drafts=drafts) == policy
    assert serve(switch, policy, OFTEN, 12, drafts=drafts) == ExitPolicy.off()
    (row,) = switch.table()
    assert row["on"] == [] and 0.5 < row["expected_wall_speedup"] < 1.25
    assert serve(switch, policy, OFTEN, 1, drafts=drafts) == policy, "when they pay again"
    seldom = serve(make_switch(num_drafts=8 * drafts), policy, SELDOM, 1, drafts=drafts)
    # Drafting spares vLLM's work of a step, also of a token that runs all layers.
    assert (seldom.mode == "off") != drafts


def test_requests_that_sample_are_judged_by_their_own_text() -> None:
    switch = make_switch()
    assert serve(switch, DEFER, OFTEN, 1, drafts=False) == DEFER
    assert serve(switch, DEFER, SELDOM, 1, drafts=False, samples=True) == ExitPolicy.off()
    assert serve(switch, DEFER, OFTEN, 1, drafts=False) == DEFER
    assert [row["samples"] for row in switch.table()] == [True, False]


def test_many_requests_may_pay_where_layers_are_dear() -> None:
    """As of a large model whose weights are read once for all rows."""
    switch = make_switch(DEAR, num_drafts=8)
    assert serve(switch, DEFER, {6: 0.8}, 8, drafts=True) == DEFER.up_to((6,))


def test_requests_that_come_all_at_once_count_before_they_decode() -> None:
    """After a lull: the mean of the last passes knows nothing of them."""
    switch = make_switch()
    assert serve(switch, DEFER, OFTEN, 1, drafts=False) == DEFER
    assert switch.begin(DEFER, drafts=False, running=1)[0] == DEFER
    assert switch.begin(DEFER, drafts=False, running=12)[0] == ExitPolicy.off()


def test_short_answers_wait_too_long_for_turns_of_others() -> None:
    """A place is empty for a step at each request's end: of ten tokens' time, among 100 or 20."""
    for answer, pays in ((100, True), (20, False)):
        policy = serve(make_switch(num_drafts=8), DEFER, {6: 0.8}, 4, drafts=True, answer=answer)
        assert (policy.mode == "defer") == pays
    alone = serve(make_switch(num_drafts=8), DEFER, {6: 0.8}, 1, drafts=True, answer=20)
    assert alone.mode == "defer", "who is alone waits for nobody"


@pytest.mark.parametrize("switches", [True, False])
def test_turns_go_through_all_layers_where_that_is_faster(switches: bool) -> None:
    """With many rows somebody needs the deep layers in nearly every turn: where these are dear, it
    is better to wait and run them once. Also on servers whose exits stay on."""
    for costs, rows, through in ((COSTS, 4, True), (DEAR, 8, False), (DEAR, 1, True)):
        switch = make_switch(costs, num_drafts=8, switches_exits=switches)
        policy = serve(switch, DEFER, {6: 0.8}, rows, drafts=True)
        assert policy.mode == "defer" or switches
        evidence = switch.begin(DEFER, drafts=True)[1]
        if evidence is not None:
            assert evidence.goes_through == through
        assert bool(switch.table()) == switches


@pytest.mark.parametrize("mode", ["verify", "fixed", "off"])
def test_others_are_left_alone(mode: str) -> None:
    policy = {
        "verify": ExitPolicy.confidence(0.5, mode="verify"),
        "fixed": ExitPolicy.fixed(6),
        "off": ExitPolicy.off(),
    }[mode]
    assert serve(make_switch(), policy, SELDOM, 12, drafts=False) == policy


def test_without_costs_all_are_on() -> None:
    assert serve(make_switch(None), CONFIDENCE, SELDOM, 12, drafts=False) == CONFIDENCE


def test_only_the_first_exits_may_be_on() -> None:
    """Whose tokens are those of a server with these exit layers."""
    shares = {6: 0.6}  # nothing ever exits behind that
    free = make_switch(screens_file="screens")
    assert serve(free, DEFER, shares, 1, drafts=False) == DEFER, "screens cost hardly anything"
    on = serve(make_switch(), DEFER, shares, 1, drafts=False)  # here every check is made
    assert [on.thresholds_at(layer) for layer in EXITS] == [(0.7, 0.85), *[(NEVER, NEVER)] * 2]


def test_a_promise_in_mode_confidence_is_of_all_exits_together() -> None:
    calibrated = ExitPolicy(mode="confidence", by_layer=tuple((e, 0.7, 0.85) for e in EXITS))
    exact, shares = replace(calibrated, mode="defer"), {6: 0.8}
    assert serve(make_switch(), calibrated, shares, 1, drafts=False) == calibrated
    assert serve(make_switch(), exact, shares, 1, drafts=False).by_layer == exact.by_layer[:1]


def test_thresholds_of_layers_that_are_not_served() -> None:
    """As of a promise that needs the deepest exit, on a server with `--exit-layers` without it."""
    elsewhere = ExitPolicy(mode="defer", by_layer=((20, 0.7, 0.85),))
    assert serve(make_switch(), elsewhere, {}, 1, drafts=False) == elsewhere


def test_what_does_not_pay_is_tried_again() -> None:
    switch = make_switch()
    assert serve(switch, DEFER, SELDOM, 1, drafts=False).mode == "off"
    begun = []
    for _ in range(2 * RETRY):
        begun.append(switch.begin(DEFER, drafts=False)[0].mode)
        for _ in range(PASSES):
            switch.note_pass(1)
    assert begun.count("off") in range(RETRY - 20, RETRY + 1), "then on, until tokens say no"
    assert serve(switch, DEFER, OFTEN, 1, drafts=False) == DEFER, "texts have changed"


def test_requests_without_an_exit_are_counted_and_told(caplog: Any, monkeypatch: Any) -> None:
    recorder = Recorder(LAYERS, EXITS)
    rules = ExitRules(num_layers=LAYERS, exit_layers=EXITS, switches_exits=True)
    switch = ExitSwitch(rules, recorder)
    switch.costs = COSTS
    monkeypatch.setattr(exit_switch.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, exit_switch.__name__):
        serve(switch, DEFER, SELDOM, 1, drafts=False)
    assert recorder.snapshot()["without_exit"][18] > 0
    (line,) = dict.fromkeys(caplog.messages)
    assert "on for mode defer, threshold 0.7: none. Requests at a time: 1; wall speedup" in line
    assert "--exit-checks screened" in line


def test_policies_are_judged_apart_and_few_are_kept() -> None:
    switch = make_switch()
    assert serve(switch, DEFER, SELDOM, 1, drafts=False).mode == "off"
    assert switch.begin(CONFIDENCE, drafts=False)[0] == CONFIDENCE
    for number in range(2 * KINDS):
        switch.begin(ExitPolicy.confidence(0.1 + number / 1000), drafts=False)
    assert len(switch.table()) == KINDS


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 200), st.sampled_from((6, 12, 18, 24))),
        max_size=30,
    ),
    st.sampled_from((CONFIDENCE, DEFER)),
    st.booleans(),
)
def test_any_traffic_leaves_a_policy_of_the_same_exits(
    traffic: list[tuple[int, int, int]], policy: ExitPolicy, drafts: bool
) -> None:
    """Whatever is counted, a request gets its policy at some of the first exits, or full depth; and
    tokens count only where all of them were on."""
    switch = make_switch(num_drafts=8 * drafts, screens_file="screens")
    for rows, passes, depth in traffic:
        got, evidence = switch.begin(policy, drafts=drafts)
        on = [layer for layer in EXITS if got.thresholds_at(layer)[0] < NEVER]
        assert on == [*EXITS[: len(on)]] and got.mode in ("off", policy.mode)
        assert all(got.thresholds_at(layer) == policy.thresholds_at(layer) for layer in on)
        assert (evidence is not None) == (got == policy)
        for _ in range(passes):
            switch.note_pass(rows)
            if evidence is not None:
                evidence.note_token(depth)
