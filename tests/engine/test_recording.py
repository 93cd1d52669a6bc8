"""A graph that is captured once and replayed does what the same Python does each time."""

import random

import torch

from exitserve.engine.layers.branches import when
from exitserve.policy import ExitPolicy

from .recording import RecordedGraph, capture, recorded
from .toy_pass import MOST, WIDTH, Parts, decode, request_of, requests

__all__ = ["recorded"]
POLICIES = (
    ExitPolicy.confidence(0.2),
    ExitPolicy.confidence(0.3),
    ExitPolicy.fixed(2),
    ExitPolicy.fixed(4),
    ExitPolicy.off(),
)


def test_a_replayed_pass_is_an_eager_one(recorded) -> None:
    numbers = random.Random(3)
    replayed, eager = requests(), requests()
    given = torch.zeros(MOST, WIDTH)
    replayed.rows.begin((), MOST, warms_up=True)
    graph = RecordedGraph()
    with capture(graph):
        normed = Parts().run(replayed.rows, hidden=given)
    seen = set()
    for step in range(60):
        for slot in range(MOST):
            if step == 0 or numbers.random() < 0.2:
                policy = numbers.choice(POLICIES)
                for every in (replayed, eager):
                    if step:
                        every.remove(str(slot))
                        every.preempted.forget([str(slot)])
                    every.add(slot, request_of(str(slot), policy))
        given.copy_(3 * torch.randn(MOST, WIDTH))
        names = [one if numbers.random() < 0.8 else "gone" for one in "0123"]
        names = names[: numbers.randint(1, MOST)]
        for every in (replayed, eager):
            every.begin(decode(names, 5 + step), None)
        if not eager.rows.may_differ:
            continue
        expected = Parts().run(eager.rows, hidden=given)
        graph.replay()
        count = len(names)
        assert torch.equal(normed[:count], expected[:count])
        for name in ("depth", "logits"):
            found = getattr(replayed.rows, name)[:count]
            assert torch.equal(found, getattr(eager.rows, name)[:count]), (step, name)
        assert torch.equal(replayed.rows.checks, eager.rows.checks)
        assert torch.equal(replayed.rows.reads, eager.rows.reads)
        seen |= set(replayed.rows.depth[:count].tolist())
        for every in (replayed, eager):
            every.end()
    assert seen == {2, 4, 6} and graph.replays > 40


def test_a_capture_runs_nothing_and_a_replay_no_python(recorded) -> None:
    state, flag, asked = torch.zeros(3), torch.tensor(True), []
    graph = RecordedGraph()

    def body() -> None:
        asked.append(1)
        state.add_(1)

    with capture(graph):
        when(flag, body)
        twice = state * 2
    assert state.tolist() == [0] * 3
    for _ in range(2):
        graph.replay()
    flag.fill_(False)
    graph.replay()
    assert (state.tolist(), twice.tolist(), asked) == ([2] * 3, [4] * 3, [1])
