"""A model class whose checks and drafts succeed by lot (`exitserve.bench.forced`).

The outcomes of checks are replaced; all work is done as ever.

Shapes: V vocabulary, B rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exitserve.bench.forced import KEY
from exitserve.engine.architectures.decoders import MultiExitLlamaForCausalLM
from exitserve.engine.early_exit.batch import Candidate, Step
from exitserve.engine.early_exit.check import Checks
from exitserve.engine.early_exit.device.batch import DeviceRequests, PassRows
from exitserve.engine.early_exit.device.rows import DeviceRows, Put, Slots
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.recorder import Recorder
from exitserve.engine.request import Request
from exitserve.engine.state import EngineState
from exitserve.engine.transfers import upload
from exitserve.policy import ALWAYS

Lot = tuple[int, ...]
"""What an outcome depends on: prompt, position and layer, so that repeats draw the same."""


_PROMPT_NUMBERS: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
"""Hashed once a request: the passes that are timed must not hash long prompts."""


def _prompt_number(request: Request) -> int:
    if request not in _PROMPT_NUMBERS:
        _PROMPT_NUMBERS[request] = hash(tuple(request.prompt_ids))
    return _PROMPT_NUMBERS[request]


def _passes(lots: Sequence[Lot], share: float) -> list[bool]:
    """Which checks pass, of which this share does."""
    return [random.Random(str(lot)).random() < share for lot in lots]


class _ForcedChecks(Checks):
    """Checks that pass by lot."""

    def __init__(self, head: ExitHead, recorder: Recorder, share: float) -> None:
        """See `Checks`; `share` of the checks pass."""
        super().__init__(head, recorder)
        self._share = share

    def settle(
        self,
        step: Step,
        layer: int,
        due: Sequence[Candidate],
        exits: Sequence[bool],
        logits: Tensor,
        places: Sequence[int],
    ) -> list[int]:
        """See `Checks.settle`; whether rows are confident does not matter."""
        lots = [(_prompt_number(one.request), step.last_positions[one.row], layer) for one in due]
        fixed = [one.request.policy.thresholds_at(layer)[0] == ALWAYS for one in due]
        drawn = [a or b for a, b in zip(fixed, _passes(lots, self._share), strict=True)]
        return super().settle(step, layer, due, drawn, logits, places)


class ForcedDeviceRows(DeviceRows):
    """Rows whose checks pass as the host says."""

    def __init__(
        self, slots: Slots, most_rows: int, num_layers: int, logits: Tensor, put: Put
    ) -> None:
        super().__init__(slots, most_rows, num_layers, logits, put)
        self.passes = torch.zeros(most_rows, dtype=torch.int64, device=logits.device)
        """[most_rows] which checks pass, bit by exit number."""

    def settle(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """See `DeviceRows.settle`; whether rows have passed does not matter."""
        drawn = (self.passes[: self.num_rows] >> self._index(layer)) & 1 != 0
        return super().settle(layer, due, drawn, logits)


class ForcedDeviceRequests(DeviceRequests):
    """Requests whose checks pass by lot."""

    rows: ForcedDeviceRows

    def __init__(
        self,
        state: EngineState,
        most_rows: int,
        logits: Tensor,
        device: torch.device,
        put: Put,
        share: float,
    ) -> None:
        """See `DeviceRequests`; `share` of the checks pass."""
        super().__init__(state, most_rows, logits, device, put)
        self.rows = ForcedDeviceRows(self._slots, most_rows, state.rules.num_layers, logits, put)
        self._share = share

    def begin(self, batch: PassRows, places: Tensor | None) -> None:
        """See `DeviceRequests.begin`; one more copy says which checks pass."""
        super().begin(batch, places)
        if not self.rows.may_differ:
            return
        found = [0] * len(batch.slots)
        for row, slot in enumerate(batch.slots):
            request = self.by_slot.get(slot)
            if request is not None and request.name == batch.names[row]:
                last = batch.computed[row] + batch.scheduled[row] - 1
                number = _prompt_number(request)
                lots = [(number, last, layer) for layer in self._rules.exit_layers]
                passes = _passes(lots, self._share)
                found[row] = sum(passed << index for index, passed in enumerate(passes))
        upload(found, self.rows.passes[: len(found)])


class ForcedLlamaForCausalLM(MultiExitLlamaForCausalLM):
    """A Llama shape of random weights whose exits are drawn by lot."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._share = float(vllm_config.additional_config[KEY]["confidence"])
        assert 0 <= self._share <= 1, self._share
        if self.host is not None:
            recorder = self.exit_state.recorder
            self.host._checks = _ForcedChecks(self._head, recorder, self._share)

    def make_device_requests(self, most_rows: int, device: torch.device) -> DeviceRequests:
        """See `MultiExitMixin.make_device_requests`."""
        room = self._head.room(most_rows, self._dtype, device)
        put, share = self._head.put, self._share
        return ForcedDeviceRequests(self.exit_state, most_rows, room, device, put, share)
