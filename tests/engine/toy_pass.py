"""A pass over toy layers with the device's rows, for tests of what decides during a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exitserve.engine.early_exit.device.batch import DeviceRequests, PassRows
from exitserve.engine.early_exit.device.rows import DeviceRows
from exitserve.engine.early_exit.masked_loop import MaskedLoop, MaskedSegment
from exitserve.engine.layers.branches import when
from exitserve.engine.request import Request
from exitserve.engine.state import EngineState
from exitserve.policy import ExitPolicy, ExitRules
from exitserve_kernels.exit_check import check_logits

WIDTH, VOCABULARY, LAYERS, MOST = 8, 16, 6, 4
RULES = ExitRules(num_layers=LAYERS, exit_layers=(2, 4))
CPU = torch.device("cpu")


class Layers:
    """A masked segment of a decoder that carries the stream as a pair, and norms nothing."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.runs = 0

    def __call__(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.runs += 1
        total = hidden if residual is None else hidden + residual
        after = hidden.tanh().masked_fill(frozen, 0.0), torch.where(frozen, state, total)
        return sum(after), *after


class Head:
    """A head whose states are half of the logits."""

    def check(self, normed: Tensor, limits: Tensor, ends: Tensor) -> Any:
        logits = torch.cat([normed, -normed], dim=-1)
        last = torch.ones(1, dtype=torch.long, device=normed.device)
        return check_logits(logits, limits, end_tokens=last, end_thresholds=ends), logits


class Parts:
    """A pass over toy layers, with a note of what was filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.segments = [Layers(2), Layers(4), Layers(LAYERS)]
        fill = SimpleNamespace(fill=lambda state, positions, end: self.filled.append(end))
        segments = [MaskedSegment(one.end, one) for one in self.segments]
        parts: Any = (segments, Head(), fill)
        self.loop = MaskedLoop(*parts)

    def run(self, rows: DeviceRows, tokens: int = MOST, hidden: Tensor | None = None) -> Tensor:
        """A pass, but for vLLM's own."""
        rows.start()
        device = rows.logits.device
        hidden = torch.randn(tokens, WIDTH, device=device) if hidden is None else hidden
        normed = self.loop.run(torch.zeros(tokens, device=device).long(), hidden, rows)
        when(
            rows.needs_whole_head().any(),
            lambda: rows.take_last_logits(torch.zeros_like(rows.logits)),
        )
        return normed


def room(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, VOCABULARY, device=device)


def put(checked: Tensor, chosen: Tensor, logits: Tensor) -> None:
    """As `ExitHead.put` of a whole head."""
    torch.where(chosen[:, None], checked, logits, out=logits)


def requests(rules: ExitRules = RULES, device: torch.device = CPU) -> DeviceRequests:
    state = EngineState(rules, torch.tensor([1]))
    return DeviceRequests(state, MOST, room(MOST, device), device, put)


def request_of(name: str, policy: ExitPolicy, prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(policy, prompt_ids=prompt, name=name)


def decode(names: list[str], first: int = 5) -> PassRows:
    """A pass of one token for each request, behind prompts of three tokens."""
    count = len(names)
    return PassRows(range(count), names, [first] * count, [1] * count, [3] * count, MOST, MOST)


def add(every: DeviceRequests, slot: int, policy: ExitPolicy) -> None:
    every.add(slot, request_of(str(slot), policy))
