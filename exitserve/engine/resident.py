"""Exit state of all requests on the device, for passes that no host decides.

A graph that is replayed asks nobody: thresholds, which checks are worth it, and what came of them
lie in tensors that stay where they are. `Slots` hold what outlives a pass, by the slot in which
vLLM's runner V2 keeps a request; `ResidentRows` are the rows of the current pass.

Shapes: S slots, B rows, T tokens, E exit layers, V / R vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exitserve.policy import ALWAYS, NEVER, ExitPolicy, ExitRules
from exitserve.schedule import LONGEST_WAIT, MEMORY, first_rate


class DeviceSchedule:
    """`exitserve.schedule.CheckSchedule` of many requests at once, number for number."""

    def __init__(
        self, break_even: Sequence[float | None], slots: int, device: torch.device
    ) -> None:
        """Starts all requests.

        Args:
            break_even: [E] success rate from which a check pays; None: every token is checked.
            slots: S.
            device: where.
        """
        self._always = [rate is None for rate in break_even]
        self._break_even = [0.0 if rate is None else rate for rate in break_even]
        shape = (len(break_even), slots)
        # float64, as Python's numbers: rates are compared.
        self._rate = torch.zeros(shape, dtype=torch.float64, device=device)
        self._wait = torch.zeros(shape, dtype=torch.int64, device=device)
        self._next_wait = torch.ones(shape, dtype=torch.int64, device=device)

    def kept(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a request's checks came to, for when it comes back to another slot."""
        return (
            self._rate[:, slot].clone(),
            self._wait[:, slot].clone(),
            self._next_wait[:, slot].clone(),
        )

    def start(self, slot: int, kept: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        """Begins a request in a slot: a new one, or one that comes back with what was `kept`."""
        if kept is not None:
            self._rate[:, slot], self._wait[:, slot], self._next_wait[:, slot] = kept
            return
        for index, rate in enumerate(self._break_even):
            self._rate[index, slot] = first_rate(rate)
        self._wait[:, slot] = 0
        self._next_wait[:, slot] = 1

    def wants(self, index: int, slots: Tensor, arrived: Tensor) -> Tensor:
        """Whether to check the tokens that `arrived` [B] bool at exit number `index`."""
        if self._always[index]:
            return arrived
        wait = self._wait[index, slots]
        waiting = arrived & (wait > 0)
        self._wait[index, slots] = wait - waiting.long()
        return arrived & ~waiting

    def saw(self, index: int, slots: Tensor, checked: Tensor, passed: Tensor) -> None:
        """Notes the outcome [B] bool of the checks that were made [B] bool."""
        if self._always[index]:
            return
        rate, wait = self._rate[index, slots], self._wait[index, slots]
        step = self._next_wait[index, slots]
        new_rate = rate + (passed.double() - rate) / MEMORY
        pays = passed | (new_rate >= self._break_even[index])
        self._rate[index, slots] = torch.where(checked, new_rate, rate)
        self._wait[index, slots] = torch.where(checked, torch.where(pays, 0, step), wait)
        longer = torch.where(pays, 1, (2 * step).clamp(max=LONGEST_WAIT))
        self._next_wait[index, slots] = torch.where(checked, longer, step)


class Slots:
    """What is known of each request, by its slot; one more slot takes what belongs to nobody."""

    def __init__(self, rules: ExitRules, slots: int, device: torch.device) -> None:
        self.exit_layers = rules.exit_layers
        self.nobody = slots
        shape = (len(rules.exit_layers), slots + 1)
        self.limits = torch.full(shape, NEVER, device=device)
        """[E, S + 1] thresholds for any token."""
        self.end_limits = torch.full(shape, NEVER, device=device)
        """[E, S + 1] thresholds for ends of sequence."""
        rates = [rules.break_even.get(layer) for layer in rules.exit_layers]
        self.paying = DeviceSchedule(rates, slots + 1, device)

    def start(self, slot: int, policy: ExitPolicy, kept: Any = None) -> None:
        """Puts a request into a slot; see `DeviceSchedule.start` for `kept`."""
        pairs = torch.tensor([policy.thresholds_at(layer) for layer in self.exit_layers])
        self.limits[:, slot] = pairs[:, 0].to(self.limits.device)
        self.end_limits[:, slot] = pairs[:, 1].to(self.limits.device)
        self.paying.start(slot, kept)


class ResidentRows:
    """The rows of a pass, as `exitserve.engine.masked.MaskedRows`.

    Everything that a graph reads or writes is allocated once. The host fills in `begin`, before
    the pass, and reads `depth` after it.
    """

    def __init__(self, slots: Slots, most_rows: int, num_layers: int, logits: Tensor) -> None:
        """Makes room.

        Args:
            slots: what is known of each request.
            most_rows: of a pass.
            num_layers: L, the depth of rows that do not exit.
            logits: [most_rows, V / R], takes those of every row.
        """
        device = slots.limits.device
        self._all = slots
        self.nobody = slots.nobody
        """The slot of rows that are nobody's."""
        self._num_layers = num_layers
        self._logits = logits
        self._slots = torch.full((most_rows,), slots.nobody, device=device)
        self._may_exit = torch.zeros(most_rows, dtype=torch.bool, device=device)
        self._asked = torch.zeros((), dtype=torch.bool, device=device)
        self._depth = torch.full((most_rows,), num_layers, dtype=torch.int32, device=device)
        self.counts = torch.zeros((len(slots.exit_layers), 2), dtype=torch.int64, device=device)
        """[E, 2] checks made and passed since the start."""
        self._forced: Tensor | None = None
        self.num_rows = 0
        self._in_order = torch.arange(most_rows, device=device)
        self._every = torch.ones(most_rows, dtype=torch.bool, device=device)
        self.places, self.freezes = self._in_order, self._every
        self._one_each = True
        self._padding: Tensor | None = None
        self._known = torch.full_like(self._depth, num_layers)
        self._known_tokens: Tensor | None = None
        self.may_differ = False
        """Whether any row may exit; the host's copy of `asked`."""
        self.warms_up = False
        """Whether the pass runs, or captures, every branch."""
        self.has_logits = False
        """Whether the pass leaves all its logits here."""

    def begin(
        self,
        slots: Tensor,
        may_exit: Tensor,
        padded: int,
        places: Tensor | None = None,
        padding: Tensor | None = None,
        known_depth: Tensor | None = None,
    ) -> None:
        """Takes the rows of a pass.

        Args:
            slots: [B] of each row's request, on the host.
            may_exit: [B] bool, on the host.
            padded: rows of the graph that runs, B or more.
            places: [B] each row's last token; None where every row has one token.
            padding: [T] bool, tokens that are nobody's, where rows have several; else those of
                the rows beyond B are.
            known_depth: [T] on the host, see `MaskedRows`; [padded] where rows have one token.
        """
        rows = len(slots)
        self.num_rows, self.warms_up = padded, False
        self._slots[:rows].copy_(slots, non_blocking=True)
        self._slots[rows:padded] = self._all.nobody
        self._may_exit[:rows].copy_(may_exit, non_blocking=True)
        self._may_exit[rows:padded] = False
        self.may_differ = known_depth is not None or bool(may_exit.any())
        self.has_logits = self.may_differ
        self._asked.fill_(self.may_differ)
        self._depth[:rows] = self._num_layers
        self._depth[rows:padded] = 0  # nobody's logits are owed
        self._known[:padded] = self._num_layers
        self._known_tokens = None
        if known_depth is not None and places is None:
            self._known[:padded].copy_(known_depth)
        elif known_depth is not None:
            self._known_tokens = known_depth.to(self._depth.device)
        self.places = self._in_order[:padded] if places is None else places
        self.freezes = self._every[:padded]
        self._one_each, self._padding = places is None, padding

    def force(self, passes: Tensor) -> None:
        """In benchmarks: which checks of the pass pass [E, B], on the host; from the first on."""
        if self._forced is None:
            shape = (len(passes), len(self._slots))
            self._forced = torch.zeros(shape, dtype=torch.bool, device=self._slots.device)
        self._forced[:, : passes.shape[1]].copy_(passes, non_blocking=True)

    @property
    def padding(self) -> Tensor | None:
        """[T] bool, on the device: tokens that are nobody's."""
        if self._one_each:
            return self._slots[: self.num_rows] == self._all.nobody
        return self._padding

    @property
    def known_depth(self) -> Tensor | None:
        """See `MaskedRows`."""
        return self._known[: self.num_rows] if self._one_each else self._known_tokens

    @property
    def asked(self) -> Tensor:
        """[] bool, on the device: whether any row may exit."""
        return self._asked

    @property
    def depth(self) -> Tensor:
        """[B] int32: how many layers each row's last token ran."""
        return self._depth[: self.num_rows]

    @property
    def logits(self) -> Tensor:
        """[B, V / R] of the pass."""
        return self._logits[: self.num_rows]

    def due(self, layer: int, running: Tensor) -> Tensor:
        """See `MaskedRows`."""
        index = self._all.exit_layers.index(layer)
        slots = self._slots[: self.num_rows]
        wanted = self._all.limits[index, slots] < NEVER
        arrived = running & wanted & self._may_exit[: self.num_rows]
        return self._all.paying.wants(index, slots, arrived)

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `MaskedRows`."""
        index = self._all.exit_layers.index(layer)
        slots = self._slots[: self.num_rows]
        return self._all.limits[index, slots], self._all.end_limits[index, slots]

    def saw(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """See `MaskedRows`; keeps the logits of the rows that exit."""
        index = self._all.exit_layers.index(layer)
        slots = self._slots[: self.num_rows]
        if self._forced is not None:
            passed = self._forced[index, : self.num_rows]
        sure = self._all.limits[index, slots] == ALWAYS
        exits = due & (passed | sure)
        self._all.paying.saw(index, slots, due, exits)
        self.logits.copy_(torch.where(exits[:, None], logits, self.logits))
        self.depth.copy_(torch.where(exits, layer, self.depth))
        self.counts[index] += torch.stack([due.sum(), exits.sum()])
        return exits

    def rest(self) -> Tensor:
        """[B] bool: rows that ran all layers, whose logits the head owes."""
        return self.depth == self._num_layers

    def take_rest(self, logits: Tensor) -> None:
        """Takes the head's logits [B, V / R] for the rows that ran all layers."""
        self.logits.copy_(torch.where(self.rest()[:, None], logits, self.logits))
