"""What runs on a card: nothing of vLLM's CPU stands in for it, and what decides on the device mixes
its tensors with none of the host's.

A card is played by fake tensors on "meta": fake ones on "cuda" fail in a PyTorch without it, as
soon as one is indexed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from exitserve.engine.drafting.gpu import Sampled, SlotRequests
from exitserve.engine.early_exit.device.requests import PassRows
from exitserve.engine.layers.branches import every_branch
from exitserve.engine.state import EngineState
from exitserve.policy import ExitPolicy, ExitRules
from exitserve.screens import KNOTS, Screen
from exitserve_kernels.propagate_kv import KeyNorm, fill, normalised

from .recording import tensors
from .toy_pass import LAYERS, MOST, WIDTH, Parts, add, decode, request_of, requests

CARD = torch.device("meta")
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
COLUMNS = 12


CPU_ALONE = ("exitserve.engine.hooks.cpu_worker", "exitserve.engine.drafting.cpu")
IMPORTS = f"""
import importlib, pkgutil, sys
import exitserve.engine
for one in pkgutil.walk_packages(exitserve.engine.__path__, "exitserve.engine."):
    if one.name not in {CPU_ALONE!r}:
        importlib.import_module(one.name)
found = [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
sys.exit(f"imported: {{found}}" if found else 0)
"""


def test_a_card_is_served_without_the_cpus_stand_ins() -> None:
    """vLLM's CPU worker replaces `torch.cuda`'s events and streams by stand-ins that do nothing."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class OneDevice(TorchDispatchMode):
    """Stops operations on tensors of both; a GPU takes some, and waits for the copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Numbers that were constants when a graph was captured are no trouble.
        given = {one.device.type for one in tensors(args, kwargs or {}) if one.dim()}
        assert len(given) < 2 or func in COPIES, f"{func} on {sorted(given)}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def card() -> Iterator[torch.device]:
    with FakeTensorMode(), OneDevice(), every_branch():
        yield CARD


@pytest.mark.parametrize("work", ["add", "at"])
def test_mixing_is_seen(card: torch.device, work: str) -> None:
    own, hosts = torch.zeros(3, device=card), torch.zeros(3).long()
    with pytest.raises(AssertionError, match="on"):
        own + hosts if work == "add" else own[hosts]


@pytest.mark.parametrize("captured", [True, False])
def test_exits_that_the_device_decides(card: torch.device, captured: bool) -> None:
    every = requests(device=card)
    if captured:
        every.rows.begin((), MOST, warms_up=True)
    else:
        add(every, 0, ExitPolicy.fixed(2))
        add(every, 1, ExitPolicy.confidence(0.3))
        every.begin(decode(["0", "1"]), None)
    parts = Parts()
    assert parts.run(every.rows).device == card
    assert parts.filled == [2, 4] and every.rows.depth.device == card


def test_a_request_that_comes_back_among_prompts(card: torch.device) -> None:
    every = requests(device=card)
    request = request_of("0", ExitPolicy.fixed(2))
    every.add(0, request)
    request.depths = [LAYERS, 2, 2]
    own = PassRows([0, 1], ["0", "x"], [0, 0], [5, 2], [6, 2], 2, 8)
    every.begin(own, torch.zeros(2, dtype=torch.int32, device=card))
    assert Parts().run(every.rows, tokens=8).device == card


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("criterion", ["max_prob", "margin", "entropy"])
def test_the_check(
    card: torch.device, monkeypatch: pytest.MonkeyPatch, criterion: str, ranks: int
) -> None:
    """Without kernels; those are given what comes before."""
    from exitserve.engine.layers import exit_head

    gather, add_up = "tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce"
    monkeypatch.setattr(exit_head, gather, lambda own, *_: torch.cat([own] * ranks, dim=-1))
    monkeypatch.setattr(exit_head, add_up, lambda own: own + 0)
    monkeypatch.setattr(exit_head, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(exit_head, "get_tensor_model_parallel_rank", lambda: 0)
    shard = SimpleNamespace(org_vocab_start_index=0, num_org_elements=COLUMNS)
    lm_head = SimpleNamespace(
        shard_indices=shard,
        num_embeddings_per_partition=COLUMNS,
        weight=torch.zeros(COLUMNS, WIDTH, device=card),
    )

    def processor(head: Any, states: Tensor, bias: Any, skip_gather: bool) -> Tensor:
        return states @ head.weight.T

    processor.org_vocab_size, processor.head_dtype = ranks * COLUMNS, None  # type: ignore[attr-defined]
    model = SimpleNamespace(output_head=lambda: lm_head, logits_processor=processor)
    meaning = torch.zeros(len(KNOTS))
    weights = torch.zeros(4, WIDTH), torch.zeros(4), torch.zeros(4), torch.zeros(1)
    screens, ends = {2: Screen(*weights, meaning, meaning)}, torch.tensor([1])
    with card:  # as vLLM makes models
        head = exit_head.ExitHead(
            model, lambda normed: normed @ lm_head.weight.T, ends, criterion, screens, {2: 0.4}
        )
    normed = torch.zeros(3, WIDTH, device=card)
    limits = torch.zeros(3, device=card)
    found, logits = head.check(normed, limits, limits)
    assert found.exits.device == found.confidence.device == card
    assert head.logits_of(logits, range(3)).shape == (3, ranks * COLUMNS)
    assert head.screens[2].score(normed).device == card


@pytest.mark.parametrize("with_all", [True, False])
def test_propagation(card: torch.device, with_all: bool) -> None:
    layers, heads, size, rows = 3, 2, 8, 5
    written: list[Tensor] = []
    store = SimpleNamespace(
        layers=layers, heads=heads, head_size=size, write=lambda *given: written.extend(given)
    )
    states = normalised(torch.zeros(rows, WIDTH, device=card), 1e-6, centred=with_all)
    weight = torch.zeros(layers * 2 * heads * size, WIDTH, device=card)
    options: dict[str, Any] = {}
    if with_all:
        options["key_norm"] = KeyNorm(torch.ones(layers, size, device=card), 1e-6)
    places = torch.zeros(rows, dtype=torch.long, device=card)
    projected = (states @ weight.T).view(rows, layers, 2, -1)
    fill(projected, places, places, store, **options)  # type: ignore[arg-type]
    assert {one.device for one in written} == {card}


def test_drafts_and_their_judge(card: torch.device) -> None:
    rules = ExitRules(num_layers=LAYERS, exit_layers=(2,))
    every = SlotRequests(EngineState(rules, torch.tensor([1])), lambda *_: -torch.inf, MOST, card)
    every.add(0, request_of("0", ExitPolicy.confidence(0.5, mode="defer")))
    every.add(1, request_of("1", ExitPolicy.off()))

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(card)

    judged = every.begin(
        Sampled(
            slots=[0, 1],
            names=["0", "1"],
            drafts=[1, 1],
            places=ints(0, 1, 2, 3),
            slot_of=ints(0, 0, 1, 1),
            ends=ints(0, 2, 4),
            positions=torch.zeros(4, dtype=torch.long, device=card),
            prompt_lengths=ints(3, 3, 3, 3),
            known_ids=torch.zeros(MOST, 16, dtype=torch.int32, device=card),
        )
    )
    assert judged is not None
    parts = (judged.places, judged.limits, judged.is_final)
    assert {one.device for one in parts} == {card}
    every.end(ints(1, 1))
