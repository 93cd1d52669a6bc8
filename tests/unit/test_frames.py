"""Frames of a step lie in one chunk: a call asks the system for no memory, however deep it is."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from exitserve.engine.frames import with_room

DEPTHS, CALLS = 150, 100


def faults_by_depth() -> list[int]:
    """[DEPTHS] page faults in CALLS calls made at each depth."""

    def leaf() -> None:
        pass

    # Larger than the frames above it, so that there are depths at which only it does not fit.
    leaf.__code__ = leaf.__code__.replace(co_stacksize=100)

    def at(depth: int) -> int:
        if depth:
            return at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(CALLS):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return [at(depth) for depth in range(DEPTHS)]


def warm(measure: Callable[[], list[int]]) -> list[int]:
    """The second measurement: the first one's code is new to the interpreter."""
    measure()
    return measure()


def test_a_call_at_any_depth_costs_no_page_fault() -> None:
    roomy = with_room(lambda: faults_by_depth())
    # A garbage collection or another thread may touch a new page now and then.
    assert max(warm(roomy)) < CALLS / 2
    if max(warm(faults_by_depth)) < CALLS:
        pytest.skip("this Python keeps the chunk, so nothing is gained here")


def test_results_and_errors_pass_through() -> None:
    @with_room
    def halved(number: int, *, by: int = 2) -> float:
        """Says what it does."""
        return number / by

    assert halved(3) == 1.5 and halved(3, by=1) == 3.0
    assert halved.__doc__ == "Says what it does."
    with pytest.raises(ZeroDivisionError):
        halved(1, by=0)
