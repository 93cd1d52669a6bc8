"""Exits that do not pay are off, for requests that begin then, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from exitserve.engine.exit_switch import PASSES
from exitserve.policy import DECIDED
from exitserve.step_costs.curves import Curve, StepCosts

PAYING = {"exit_checks": "paying"}
LAYERS = 6


@pytest.fixture
def model(make_checkpoint: Any) -> Any:
    return make_checkpoint("llama", exit_layers=(2, 4))


def set_costs(harness: Any, costs: Any) -> None:
    def change(worker: Any) -> None:
        switch = worker._exit_state.switch
        switch.costs = costs
        switch._kinds.clear()  # other tests have the same engine

    harness.engine.collective_rpc(change)


def costs(*, layer: float, exits: float) -> StepCosts:
    """The same for any number of rows."""
    parts = {"fill": 0.0, "attention": 0.0, "check": 1.0, "head": 1.0, "rest": 1.0}
    return StepCosts(
        num_layers=LAYERS,
        **{
            name: Curve(((1, seconds), (16, seconds)))
            for name, seconds in (parts | {"matrices": layer, "exits": exits}).items()
        },
    )


NEVER_PAY, ALWAYS_PAY = costs(layer=1.0, exits=1e3), costs(layer=1e3, exits=0.0)


def test_parts_are_timed_at_start(start: Any, model: Any) -> None:
    def costs_of(exits: dict[str, str]) -> Any:
        harness = start(model, exits=exits)
        return harness.engine.collective_rpc(lambda worker: worker._exit_state.switch.costs)[0]

    found = costs_of(PAYING)
    for part in (found.matrices, found.fill, found.check, found.head, found.rest, found.exits):
        assert all(seconds > 0 for _, seconds in part.points)
    assert found.num_layers == LAYERS and found.matrices(1) < found.full(1) < 1.0
    assert costs_of({"exit_checks": "screened"}) is None


@pytest.mark.parametrize("mode", DECIDED)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_keeps_the_exits_with_which_it_began(
    start: Any, model: Any, job: Any, oracle: Any, expect: Any, mode: str, drafts: bool
) -> None:
    drafting = {"mode": "verify", "exit_threshold": 0.06, "num_drafts": 3} if drafts else {}
    harness = start(model, exits=PAYING | drafting, enable_prefix_caching=False, max_num_seqs=11)
    reference = oracle(model)
    fields = {"exit_threshold": 0.06, "exit_mode": mode}
    early = [job([5, 9, 4, one], fields, 60) for one in range(2, 6)]
    full = [job(one.prompt, {}, 60) for one in early]
    exiting = [expect(reference, one) for one in early]
    assert all({*depths[1:]} - {LAYERS} for _, depths in exiting), "of which each exits somewhere"

    set_costs(harness, NEVER_PAY)
    before = harness.stats()["without_exit"]
    found = harness.run([*early, *early], every=PASSES // 4)
    changes = [one == other for one, other in zip(found, exiting * 2, strict=True)]
    assert changes[0] and not changes[-1]
    assert changes == sorted(changes, reverse=True), "first with exits, then without"
    late = changes.index(False)
    assert found[late:] == [expect(reference, one) for one in (full * 2)[late:]]
    without = harness.stats()["without_exit"]
    assert {layer: without[layer] - before[layer] for layer in (2, 4)} == dict.fromkeys(
        (2, 4), len(found) - late
    )
    (row,) = harness.stats()["exit_switch"]
    assert row["mode"] == mode and row["on"] == [] and row["drafts"] == drafts

    noted = harness.notes(early[:1])[0]
    assert any(checks for checks, _ in noted), "who asks for checks gets them"

    set_costs(harness, ALWAYS_PAY)
    harness.run([full[0]] * 2, every=2 * PASSES)
    assert harness.run(early) == exiting


@pytest.mark.parametrize("mode", DECIDED)
@pytest.mark.parametrize("drafts", [False, True])
def test_also_while_it_is_preempted(
    start: Any,
    model: Any,
    job: Any,
    oracle: Any,
    expect: Any,
    few_blocks: dict[str, Any],
    mode: str,
    drafts: bool,
) -> None:
    drafting = {"mode": "verify", "exit_threshold": 0.06, "num_drafts": 3} if drafts else {}
    harness = start(model, exits=PAYING | drafting, max_num_batched_tokens=128, **few_blocks)
    fields = {"exit_threshold": 0.06, "exit_mode": mode}
    asked = [job([5, 9, 4, one % 20 + 2], fields, 90) for one in range(24)]
    reference = oracle(model)
    exiting = [expect(reference, one) for one in asked]
    full = [expect(reference, job(one.prompt, {}, one.max_tokens)) for one in asked]
    some = [first_exit_only(reference, one) for one in asked]
    seen = set[int]()
    for costs in (NEVER_PAY, ALWAYS_PAY):
        set_costs(harness, costs)
        found = harness.run(asked, every=2)
        for one, *ways in zip(found, exiting, some, full, strict=True):
            assert one in ways
            seen.add(one == ways[-1])
        for _ in range(2 * PASSES):
            harness.engine.collective_rpc(_pass)
    assert harness.counter("vllm:num_preemptions") > 5 and seen == {False, True}


def _pass(worker: Any) -> None:
    worker._exit_state.switch.note_pass(1)


def test_some_exits_may_be_off(start: Any, model: Any, job: Any, oracle: Any) -> None:
    """Those of a server with fewer exit layers, as the oracle has them."""
    harness = start(model, exits=PAYING, enable_prefix_caching=False, max_num_seqs=11)
    set_costs(harness, ALWAYS_PAY)
    asked = [job([7, 3, one], {"exit_threshold": 0.06, "exit_mode": "defer"}, 60) for one in (2, 3)]
    reference = oracle(model)

    def keep_first(worker: Any) -> None:
        switch = worker._exit_state.switch
        switch.begin(asked[0].policy, drafts=False)
        (kind,) = switch._kinds.values()
        kind.on = (2,)

    harness.engine.collective_rpc(keep_first)
    found = harness.run(asked)
    assert found == [first_exit_only(reference, one) for one in asked]
    assert not any(4 in depths for _, depths in found)


def first_exit_only(reference: Any, job: Any) -> tuple[list[int], list[int]]:
    """What the oracle says to a request without its deeper exit."""
    said = reference.decode(job.prompt, job.max_tokens, job.policy.up_to((2,)), ignore_eos=True)
    return said.token_ids, said.exit_layers
