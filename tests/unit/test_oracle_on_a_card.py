"""What commands do with the oracle, on a device that is not the CPU: the same as on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exitserve.bench.run import _agreeing
from exitserve.calibration import screening
from exitserve.calibration.outcomes import Piece, measure_outcome, run_at_full_depth
from exitserve.calibration.pieces import model_continuations
from exitserve.calibration.scores import read_exits
from exitserve.evaluation.acceptance import measure_drafts
from exitserve.evaluation.oracle import measure_quality
from exitserve.evaluation.settings import EvalSetting
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference, roomy_device
from exitserve.windows import Window

from ..card import card

TEXT = tuple(ord(c) for c in "the quick brown fox jumps over the lazy dog")
PROMPT = 8
EARLY = ExitPolicy.confidence(0.1)
VERIFY = ExitPolicy.confidence(0.1, mode="verify")


def test_devices_do_not_mix() -> None:
    with card() as device:
        own = torch.arange(3, device=device) + torch.tensor([1, 1, 1], device=device)
        assert own.device == device and own.tolist() == [1, 2, 3]
        assert own[torch.tensor([0, 2])].tolist() == [1, 3], "an index may be the host's"
        with pytest.raises(RuntimeError, match="card"):
            own + torch.ones(3)
        with pytest.raises(RuntimeError, match="card"):
            torch.ones(3)[own - 1]


def trace(reference: Reference) -> Any:
    return [list(reference.watch(TEXT[:PROMPT], 3, policy)) for policy in (EARLY, VERIFY)]


def evaluate(reference: Reference) -> Any:
    ways = [EvalSetting(fields={}, policy=policy) for policy in (EARLY, VERIFY)]
    found = measure_quality(reference, [Window(TEXT, 0)], PROMPT, ways, lambda: None)
    drafts = measure_drafts(reference, [Window(TEXT, 0)], PROMPT, lambda: None)
    return [(one.by_depth, one.drafted, one.accepted) for one in found], drafts


def calibrate(reference: Reference) -> Any:
    written = model_continuations(reference, [TEXT[:PROMPT]], 9, 0.7, 0, lambda count: None)
    pieces = [Piece(TEXT, PROMPT, "text"), *written]
    screens = screening.fit_screens(reference, pieces, lambda: None)
    readings = [read_exits(reference, piece, screens) for piece in pieces]
    full = run_at_full_depth(reference, pieces[0], reference.exit_layers)
    shown = screening.screening(readings[0].scores, screens["margin"], "margin", {1: 0.5, 2: 0.4})
    nats = [{layer: one.tolist() for layer, one in reading.nats.items()} for reading in readings]
    return written, shown, nats, measure_outcome(reference, pieces[0], full, EARLY)


def bench(reference: Reference) -> Any:
    return _agreeing(reference, TEXT[:PROMPT], TEXT[PROMPT:])


@pytest.mark.parametrize("work", [trace, evaluate, calibrate, bench])
def test_a_command_gives_the_same(
    make_checkpoint, monkeypatch: pytest.MonkeyPatch, work: Callable[[Reference], Any]
) -> None:
    monkeypatch.setattr(screening, "STEPS", 3)
    own = load_reference(str(make_checkpoint("llama", exits=(1, 2), num_hidden_layers=3)))
    own.model.set_attn_implementation("eager")  # the same operations on both
    expected = work(own)
    with card() as device:
        model = copy.deepcopy(own.model).to(device)
        screens = {layer: one.to(device) for layer, one in own.screens.items()}
        ends = own.eos_token_ids.tolist()
        there = Reference(model, own.exit_layers, ends, own.criterion, screens, own.break_even)
        assert work(there) == expected


@pytest.mark.parametrize(("free", "chosen"), [(10**9, "cuda"), (10**5, "cpu")])
def test_a_gpu_is_used_where_it_has_room(
    monkeypatch: pytest.MonkeyPatch, free: int, chosen: str
) -> None:
    """A server on the same GPU may have taken its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10**10))
    assert roomy_device(torch.nn.Linear(1000, 1000)).type == chosen
