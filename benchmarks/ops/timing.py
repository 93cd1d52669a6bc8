"""Times several forms of the same work in turn, and measures the memory that each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

ROUNDS = 7
FUSED = "fused"
Work = Callable[[], Any]


class TimedCase(NamedTuple):
    """Work of one size, in all its forms."""

    operation: str
    size: str
    forms: Mapping[str, Work]
    """By name. `FUSED` is what the others are compared with; it is missing without a GPU."""
    moved: int = 0
    """Bytes that every form moves at least, such as weights; 0: too few to bound the time."""


class TimingLine(NamedTuple):
    """What was measured of one form."""

    operation: str
    size: str
    form: str
    seconds: float
    fused_share: tuple[float, float, float] | None
    """The fused form's time divided by this form's of the same round: median, least, greatest."""
    peak_bytes: int | None
    """Greatest memory allocated during a call beyond what was there before; None on a CPU."""
    of_bandwidth: float | None
    """Those bytes a second, divided by the bytes a second of a copy."""

    def cells(self) -> list[str]:
        """The line in a table with `HEADERS`."""
        share, peak, bandwidth = self.fused_share, self.peak_bytes, self.of_bandwidth
        return [
            self.operation,
            self.size,
            self.form,
            f"{1e6 * self.seconds:.1f}",
            "-" if share is None else "{:.2f} ({:.2f}-{:.2f})".format(*share),
            "-" if peak is None else f"{peak / 2**20:.1f}",
            "-" if bandwidth is None else f"{bandwidth:.0%}",
        ]


HEADERS = ["operation", "size", "form", "µs", "fused / it (range)", "peak MiB", "of bandwidth"]


def measured(case: TimedCase, device: torch.device, bandwidth: float) -> list[TimingLine]:
    """One line a form: all forms in turn, round after round; the first round warms up.

    Args:
        case: what to time.
        device: where it runs.
        bandwidth: bytes a second of a copy there.
    """
    times: dict[str, list[float]] = {form: [] for form in case.forms}
    for turn in range(ROUNDS + 1):
        for form, work in case.forms.items():
            found = seconds(work, device)
            if turn:
                times[form].append(found)
    lines = []
    for form, work in case.forms.items():
        median = statistics.median(times[form])
        share = None
        if FUSED in times and form != FUSED:
            shares = [a / b for a, b in zip(times[FUSED], times[form], strict=True)]
            share = (statistics.median(shares), min(shares), max(shares))
        peak = _peak_bytes(work) if device.type == "cuda" else None
        of_bandwidth = case.moved / bandwidth / median if case.moved else None
        lines.append(TimingLine(case.operation, case.size, form, median, share, peak, of_bandwidth))
    return lines


def seconds(work: Work, device: torch.device) -> float:
    """Of one call: many in a row, so that launches overlap as they do in use."""
    calls = 20 if device.type == "cuda" else 2
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def _peak_bytes(work: Work) -> int:
    """Of a call that is warm: a library's workspaces are there already and do not count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(5)]
    return 2 * size / statistics.median(times)
