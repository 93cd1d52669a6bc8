"""Numbers between host and device, in both directions without waiting for each other."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Sequence[object], to: Tensor) -> None:
    """Copies numbers of the host, nested as `to` is, into that tensor, and does not wait.

    Each copy has pinned memory of its own. PyTorch's allocator of such memory hands it out again
    only when the copy is made, so passes that are scheduled ahead overwrite nothing.
    """
    host = torch.tensor(numbers, dtype=to.dtype, device="cpu", pin_memory=to.is_cuda)
    to.copy_(host, non_blocking=True)


class Arrivals:
    """What the device was asked for, in that order; each is taken once it is there."""

    def __init__(self) -> None:
        self._asked: deque[tuple[Tensor | None, Any, Callable[[Any], None]]] = deque()

    def ask(self, source: Tensor, take: Callable[[Any], None]) -> None:
        """Has `take` called with the numbers of a tensor, nested lists, by a later `drain`.

        Args:
            source: as it will be when the work that is under way is done.
            take: called on the host.
        """
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        host.copy_(source, non_blocking=True)
        arrived = None
        if source.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._asked.append((host, arrived, take))

    def then(self, take: Callable[[Any], None]) -> None:
        """Has `take` called with None when all that was asked for before has been taken."""
        self._asked.append((None, None, take))

    def drain(self, *, wait: bool) -> None:
        """Takes what has arrived; with `wait`, all that was asked for."""
        while self._asked:
            host, arrived, take = self._asked[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._asked.popleft()
            take(None if host is None else host.tolist())
