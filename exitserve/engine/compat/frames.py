"""Room for Python's frames while a compiled pass runs.

CPython keeps the frames of Python functions in chunks of 16 KiB. The code that `torch.compile`
writes for all layers of a model is one function of a thousand variables: its frame may
fill a chunk, and then every small function that it calls gets a new chunk from the operating
system, and gives it back when it returns. Whether it does depends on the number of layers and on
how many frames lie below: with 24 layers and engine and caller in one process it took 0.5 ms a
pass, in a worker process nothing. A frame that is larger than a chunk gets a larger one
(`push_chunk` in CPython's `Python/pystate.c`), in which there is room for all frames above it; so
the pass is called from such a frame, for five page faults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SLOTS = 16384
"""Of eight bytes, in the frame; at least as many are left for others."""


def with_room(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, called from a frame behind which there is room for those it needs."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return function(*args, **kwargs)

    assert isinstance(call, FunctionType)
    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
    return call
