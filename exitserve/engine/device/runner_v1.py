"""Runner V1 in the place of runner V2: how a machine without a GPU runs the loop of one.

V2's model state (`exitserve.engine.hooks.model_state`) is told of requests and passes; here the
same is read from V1's batch. For tests (`exit_path` "resident"): on a CPU, the loop on the host,
whose rows leave the batch, is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exitserve.engine.compat.context import BatchShape
from exitserve.engine.device.requests import DeviceRequests, PassRows
from exitserve.engine.device.rows import DeviceRows
from exitserve.engine.state import EngineState


class DeviceRequestsOnV1:
    """Follows V1's batch for `DeviceRequests`."""

    def __init__(self, state: EngineState, model: Any, most_rows: int) -> None:
        """Makes room for `most_rows` requests of a `MultiExitMixin`."""
        self._batch = state.batch
        device = torch.device("cpu")
        self._requests: DeviceRequests = model.make_device_requests(most_rows, device)
        self._free = list(range(most_rows))
        self._slot_of: dict[str, int] = {}

    def begin(self, shape: BatchShape | None, positions: Tensor) -> DeviceRows | None:
        """Fills in the rows of a pass over `positions` [T]; None before there is a cache."""
        if shape is None:
            return None
        ends = shape.row_ends.tolist()
        starts = [0, *ends[:-1]]
        requests = [self._batch.named(row) for row in range(len(ends))]
        names = [request.name for request in requests]
        for gone in set(self._slot_of) - set(names):
            self._requests.remove(gone)
            self._free.append(self._slot_of.pop(gone))
            if not self._batch.preempted.may_return(gone):
                self._requests.forget([gone])
        for name, request in zip(names, requests, strict=True):
            if name not in self._slot_of:
                self._slot_of[name] = self._free.pop()
                self._requests.add(self._slot_of[name], request)
        batch = PassRows(
            slots=[self._slot_of[name] for name in names],
            names=names,
            computed=positions[starts].tolist(),
            scheduled=[end - start for start, end in zip(starts, ends, strict=True)],
            known=[request.length for request in requests],
            padded=len(ends),
            padded_tokens=shape.num_tokens,
        )
        several = shape.num_tokens > len(ends)
        self._requests.begin(batch, torch.tensor(ends) - 1 if several else None)
        return self._requests.rows

    def end(self) -> None:
        """The pass is done."""
        self._requests.end()
