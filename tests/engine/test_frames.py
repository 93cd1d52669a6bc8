"""Room for Python's frames."""

from __future__ import annotations

import pytest

from exitserve.engine.compat.frames import SLOTS, with_room


@with_room
def ratio(one: int, *, other: int) -> float:
    """One number by another."""
    return one / other


def test_calls_stay_what_they_are() -> None:
    assert ratio(1, other=2) == 0.5
    assert ratio.__name__ == "ratio"
    assert ratio.__doc__ == "One number by another."
    with pytest.raises(ZeroDivisionError):
        ratio(1, other=0)


def test_the_frame_is_larger_than_a_chunk() -> None:
    """16 KiB on CPython, in slots of a pointer."""
    assert ratio.__code__.co_stacksize == SLOTS > 16384 // 8
