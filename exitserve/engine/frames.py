"""Room for the frames of a step, so that no call in it asks the system for memory.

CPython keeps the frames of running functions in chunks of 16 KiB. A call that does not fit into the
last chunk maps another, and returning from it unmaps that again: 6 us in place of 0.02, for every
call at the depth at which a chunk happens to end (`push_chunk` in CPython's `Python/pystate.c`).
A pass calls a model's attention twice a layer, so that one frame more or less above it decides
whether this costs a tenth of a step or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

WORDS = 16_000
"""Of the frame: 128 kB. The chunk that holds it has the size of the next power of two, so a bit
less than that is left for what it calls."""


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, in a frame so large that it and all that it calls lie in one chunk."""
    own = cast(FunctionType, function)
    own.__code__ = own.__code__.replace(co_stacksize=WORDS)
    return function
