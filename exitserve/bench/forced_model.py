"""A model class whose checks and drafts succeed by lot (`exitserve.bench.forced`).

It overrides the few methods in which the engine decides; all work is done as ever.

Shapes: S logits that the sampler wants, V vocabulary, B rows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exitserve.bench.forced import KEY
from exitserve.engine.architectures.decoders import MultiExitLlamaForCausalLM
from exitserve.engine.early_exit.batch import Candidate, Step
from exitserve.engine.early_exit.check import Checks
from exitserve.engine.early_exit.device.requests import DeviceRequests, PassRows
from exitserve.engine.early_exit.device.rows import DeviceRows, Slots
from exitserve.engine.early_exit.forward import HostLoop
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.requests import Request
from exitserve.engine.state import EngineState
from exitserve.engine.transfers import upload
from exitserve.errors import ExitServeError

Lot = tuple[int, ...]
"""What an outcome depends on: prompt, position and layer, so that repeats draw the same."""


class ForcedOutcomes:
    """Draws outcomes."""

    def __init__(self, shares: Mapping[str, Any]) -> None:
        """Takes `confidence` and `acceptance`, each between 0 and 1.

        Raises:
            ExitServeError: one is missing or out of range.
        """
        self.confidence, self.acceptance = (
            _share(shares, name) for name in ("confidence", "acceptance")
        )

    def passes(self, lots: Sequence[Lot]) -> list[bool]:
        """Which checks pass."""
        return [_draw("check", lot) < self.confidence for lot in lots]

    def accept(self, logits: Tensor, drafts: Sequence[int], lots: Sequence[Lot]) -> None:
        """Makes drafts the most likely tokens, except those that are not accepted.

        Args:
            logits: [K, V], those that judge each draft; changed in place.
            drafts: [K].
            lots: [K].
        """
        for own, token, lot in zip(logits, drafts, lots, strict=True):
            accepted = _draw("draft", lot) < self.acceptance
            own[token] = own.max() + 1 if accepted else own.min()


def _draw(what: str, lot: Lot) -> float:
    return random.Random(f"{what}:{lot}").random()


def _share(shares: Mapping[str, Any], name: str) -> float:
    value = shares.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ExitServeError(f"forced {name} must be a number from 0 to 1, not {value!r}.")
    return float(value)


_PROMPT_NUMBERS: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
"""Hashed once a request: the passes that are timed must not hash long prompts."""


def _prompt_number(request: Request) -> int:
    if request not in _PROMPT_NUMBERS:
        _PROMPT_NUMBERS[request] = hash(tuple(request.prompt_ids))
    return _PROMPT_NUMBERS[request]


class _ForcedChecks(Checks):
    """Checks that pass by lot."""

    outcomes: ForcedOutcomes

    def outcome(
        self, checked: Sequence[Candidate], layer: int, step: Step, confident: list[bool]
    ) -> list[bool]:
        """See `Checks.outcome`."""
        return self.outcomes.passes(
            [(_prompt_number(c.request), step.last_positions[c.row], layer) for c in checked]
        )


class _ForcedHostLoop(HostLoop):
    """Passes whose checks pass, and whose drafts are accepted, by lot."""

    def make_checks(self, head: ExitHead) -> Checks:
        """See `HostLoop.make_checks`."""
        checks = _ForcedChecks(head, self._recorder)
        checks.outcomes = self._model.outcomes
        return checks


class ForcedDeviceRows(DeviceRows):
    """Rows whose checks pass as the host says."""

    def __init__(self, slots: Slots, most_rows: int, num_layers: int, logits: Tensor) -> None:
        """See `DeviceRows`."""
        super().__init__(slots, most_rows, num_layers, logits)
        self.passes = torch.zeros(most_rows, dtype=torch.int64, device=logits.device)
        """[most_rows] which checks pass, bit by exit number."""

    def outcome(self, index: int, confident: Tensor) -> Tensor:
        """See `DeviceRows.outcome`."""
        return (self.passes[: self.num_rows] >> index) & 1 != 0


class ForcedDeviceRequests(DeviceRequests):
    """Requests whose checks pass by lot."""

    outcomes: ForcedOutcomes
    rows: ForcedDeviceRows

    def make_rows(self, slots: Slots, most_rows: int, logits: Tensor) -> DeviceRows:
        """See `DeviceRequests.make_rows`."""
        return ForcedDeviceRows(slots, most_rows, self._rules.num_layers, logits)

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
                passes = self.outcomes.passes(lots)
                found[row] = sum(passed << index for index, passed in enumerate(passes))
        upload(found, self.rows.passes[: len(found)])


class ForcedLlamaForCausalLM(MultiExitLlamaForCausalLM):
    """A Llama shape of random weights whose exits are drawn by lot."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        """Reads the shares from `additional_config`, before the loop is made."""
        self.outcomes = ForcedOutcomes(vllm_config.additional_config[KEY])
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)

    def make_host_loop(self, *parts: Any) -> HostLoop:
        """See `MultiExitMixin.make_host_loop`."""
        return _ForcedHostLoop(*parts)

    def make_device_requests(self, most_rows: int, device: torch.device) -> DeviceRequests:
        """See `MultiExitMixin.make_device_requests`."""
        return forced_device_requests(
            self.exit_state, most_rows, self.logits_room(most_rows, device), device, self.outcomes
        )


def forced_device_requests(
    state: EngineState,
    most_rows: int,
    logits: Tensor,
    device: torch.device,
    outcomes: ForcedOutcomes,
) -> ForcedDeviceRequests:
    """See `DeviceRequests`; `outcomes` draws which checks pass."""
    found = ForcedDeviceRequests(state, most_rows, logits, device)
    found.outcomes = outcomes
    return found
