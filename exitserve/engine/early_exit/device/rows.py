"""Exit state of all requests on the device, for passes whose exits the device decides.

A graph that is replayed runs no Python: thresholds, and what came of checks, lie in tensors that
stay where they are. `Slots` hold what outlives a pass, by the slot in which vLLM's runner V2 keeps
a request; `DeviceRows` are the rows of the current pass.

The host uploads what it knows of a pass in one copy, and in none where no row may exit and none
might in the pass before. Everything else is computed on the device, inside the graph.

Shapes: S slots, B rows, T tokens, E exit layers, V / R vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exitserve.engine.early_exit.masked_loop import Places
from exitserve.engine.transfers import upload
from exitserve.policy import ALWAYS, NEVER, ExitPolicy, ExitRules

Put = Callable[[Tensor, Tensor, Tensor], None]
"""See `ExitHead.put`."""


class Slots:
    """What is known of each request, by its slot; the last one is for rows without a request."""

    def __init__(self, rules: ExitRules, slots: int, device: torch.device) -> None:
        self.exit_layers = rules.exit_layers
        self.empty = slots
        """The slot of rows without a request, which fill up a graph."""
        # One entry for each slot, so that one copy starts a request.
        shape = (slots + 1, 2, len(rules.exit_layers))
        self.limits = torch.full(shape, NEVER, dtype=torch.float32, device=device)
        """[S + 1, 2, E] thresholds for any token, and for ends of sequence."""

    def start(self, slot: int, policy: ExitPolicy) -> None:
        """Puts a request into a slot."""
        pairs = [policy.thresholds_at(layer) for layer in self.exit_layers]
        limits, ends = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        upload([limits, ends], self.limits[slot])


class HostRow(NamedTuple):
    """What the host knows of a row before the pass."""

    slot: int
    """Its request's."""
    may_exit: bool
    known_depth: int
    """Of its token, see `MaskedRows`; not read where rows have several."""
    needs_whole_head: bool
    """If its token exits, see `Request`."""


class DeviceRows:
    """The rows of a pass, as `exitserve.engine.early_exit.masked_loop.MaskedRows`.

    Everything that a graph reads or writes is allocated once. The host fills in `begin` before
    the pass, and reads `depth` after it. The pass begins with `start`, on the device.
    """

    def __init__(
        self, slots: Slots, most_rows: int, num_layers: int, logits: Tensor, put: Put
    ) -> None:
        """Makes room.

        Args:
            slots: what is known of each request.
            most_rows: of a pass.
            num_layers: L, the depth of rows that do not exit.
            logits: [most_rows, V / R], takes those of every row.
            put: see `ExitHead.put`.
        """
        device = slots.limits.device
        self._requests, self._num_layers, self._logits = slots, num_layers, logits
        self._put = put
        self._empty_row = HostRow(slots.empty, False, num_layers, False)
        # First whether any row may exit, then the rows: [1 + most_rows, 4].
        self._uploaded = torch.zeros(
            (1 + most_rows, len(self._empty_row)), dtype=torch.int64, device=device
        )
        self._any_may_exit = self._uploaded[0, 0]
        self._any_might_before = False
        self._depth = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self.checks = torch.zeros((len(slots.exit_layers), 3), dtype=torch.int64, device=device)
        """[E, 3] since the start: checks made, those that passed, and reads of the exit rows."""
        self.reads = torch.zeros(2, dtype=torch.int64, device=device)
        """[2] since the start, in passes in which a row may exit: layers, each counted once while
        any row still runs, and reads of the whole head."""
        self.num_rows = 0
        self.places: Places = slice(0)
        self._one_each = True
        self._padding: Tensor | None = None
        self._known_tokens: Tensor | None = None
        self.may_differ = False
        """Whether any row may exit; the host's copy of `any_may_exit`."""
        self.warms_up = False
        """Whether the pass runs, or captures, every branch."""
        self.has_logits = False
        """Whether the pass leaves all its logits here."""

    def begin(
        self,
        rows: Sequence[HostRow],
        padded: int,
        places: Tensor | None = None,
        padding: Tensor | None = None,
        known_depth: Sequence[int] | None = None,
        *,
        warms_up: bool = False,
    ) -> None:
        """Takes the rows of a pass.

        Args:
            rows: [B]; none where the pass is vLLM's own: no token may exit, or did before.
            padded: rows of the graph that runs, B or more.
            places: [B] each row's last token; None where every row has one token.
            padding: [T] bool, tokens without a request, where rows have several; else those of
                the rows beyond B are.
            known_depth: [T] where rows have several tokens, see `MaskedRows`.
            warms_up: whether the pass runs, or captures, every branch.
        """
        self.num_rows, self.warms_up = padded, warms_up
        self.may_differ = self.has_logits = bool(rows)
        if not (rows or self._any_might_before or warms_up):
            return  # of all this, vLLM's own pass reads `any_may_exit` alone: false already
        self._any_might_before = bool(rows)
        any_may_exit = (self._any_might_before,) + (0,) * (len(self._empty_row) - 1)
        beyond = [self._empty_row] * (padded - len(rows))
        upload([any_may_exit, *rows, *beyond], self._uploaded[: 1 + padded])
        self.places = slice(padded) if places is None else places.long()
        self._one_each, self._padding = places is None, padding
        self._known_tokens = None
        if known_depth is not None:
            self._known_tokens = self._uploaded.new_empty(len(known_depth))
            upload(known_depth, self._known_tokens)

    def start(self) -> None:
        """Begins the pass, on the device: rows without a request have no depth.

        What exits need of each row is looked up once for all of them: each small operation here is
        a kernel of its own.
        """
        self._is_empty = self._slots == self._requests.empty
        self.depth.fill_(self._num_layers).masked_fill_(self._is_empty, 0)
        self._limits, self._end_limits = self._requests.limits[self._slots].unbind(1)
        self._may_be_due = (self._limits < NEVER) & (self._rows[:, 1:2] != 0)
        self._unchecked = self._limits == ALWAYS

    @property
    def _rows(self) -> Tensor:
        return self._uploaded[1 : 1 + self.num_rows]

    @property
    def _slots(self) -> Tensor:
        return self._rows[:, 0]

    @property
    def padding(self) -> Tensor | None:
        """[T] bool, on the device: tokens without a request."""
        return self._is_empty if self._one_each else self._padding

    @property
    def known_depth(self) -> Tensor | None:
        """See `MaskedRows`."""
        return self._rows[:, 2] if self._one_each else self._known_tokens

    @property
    def _needs_whole_head(self) -> Tensor:
        return self._rows[:, 3] != 0

    @property
    def any_may_exit(self) -> Tensor:
        """[] bool, on the device: whether any row may exit."""
        return self._any_may_exit != 0

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
        return running & self._may_be_due[:, self._index(layer)]

    def thresholds(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `MaskedRows`."""
        index = self._index(layer)
        return self._limits[:, index], self._end_limits[:, index]

    def settle(self, layer: int, due: Tensor, passed: Tensor, logits: Tensor) -> Tensor:
        """See `MaskedRows`; keeps the logits of the rows that exit by them."""
        index = self._index(layer)
        exits = due & (passed | self._unchecked[:, index])
        self._put(logits, exits & ~self._needs_whole_head, self.logits)
        self.depth.masked_fill_(exits, layer)
        self.checks[index, :2].add_(torch.stack([due, exits]).sum(dim=1))
        self.checks[index, 2].add_(due.any())
        return exits

    def _index(self, layer: int) -> int:
        """Of an exit layer among all."""
        return self._requests.exit_layers.index(layer)

    def count_layers(self, layers: int) -> None:
        """See `MaskedRows`. A pass that only warms up counts nothing."""
        self.reads[0].add_(self._any_may_exit, alpha=layers)

    def needs_whole_head(self) -> Tensor:
        """[B] bool: rows whose logits the whole head is still to give: those that ran all layers,
        and those that exited and need more than the exit rows'."""
        return (self.depth == self._num_layers) | self._needs_whole_head

    def take_last_logits(self, logits: Tensor) -> None:
        """Takes the whole head's logits [B, V / R] for the rows that need them."""
        self.reads[1].add_(self._any_may_exit)
        rows = self.needs_whole_head()
        torch.where(rows[:, None], logits, self.logits, out=self.logits)
