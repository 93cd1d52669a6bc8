"""Runner V1 in the place of runner V2: how a machine without a GPU tries what a GPU runs.

V2's model state (`exitserve.engine.hooks.model_state`) is told of requests and passes; here the
same is read off V1's batch. For tests (`exit_path` "resident"): a CPU's own way, with rows that
leave the batch, is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exitserve.engine.compat.context import BatchShape
from exitserve.engine.device.requests import PassRows, device_requests
from exitserve.engine.device.rows import DeviceRows
from exitserve.engine.host.rows import HostRows


class DeviceRequestsOnV1:
    """Follows V1's batch for `DeviceRequests`."""

    def __init__(self, rows: HostRows, model: Any, most_rows: int) -> None:
        self._rows = rows
        self._requests = device_requests(rows, model, most_rows, torch.device("cpu"))
        self._free = list(range(most_rows))
        self._slot_of: dict[str, int] = {}

    def begin(self, shape: BatchShape | None, positions: Tensor) -> DeviceRows | None:
        """Fills in the rows of a pass over `positions` [T]; None before there is a cache."""
        if shape is None:
            return None
        ends = shape.row_ends.tolist()
        starts = [0, *ends[:-1]]
        known = self._rows.known()
        names = [known[row].request_id for row in range(len(ends))]
        for gone in set(self._slot_of) - set(names):
            self._requests.remove(gone)
            self._free.append(self._slot_of.pop(gone))
        for row, name in enumerate(names):
            if name not in self._slot_of:
                self._slot_of[name] = self._free.pop()
                self._requests.add(self._slot_of[name], known[row])
        batch = PassRows(
            slots=[self._slot_of[name] for name in names],
            request_ids=names,
            computed=positions[starts].tolist(),
            scheduled=[end - start for start, end in zip(starts, ends, strict=True)],
            known=[self._rows.length(row) for row in range(len(ends))],
            padded=len(ends),
            padded_tokens=shape.num_tokens,
        )
        several = shape.num_tokens > len(ends)
        self._requests.begin(batch, torch.tensor(ends) - 1 if several else None)
        return self._requests.rows

    def ended(self) -> None:
        """The pass is done."""
        self._requests.ended()
