"""The passes of a comparison, and about how long each part of it takes: told before it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from exitserve.bench.engines import SETTLE_SECONDS
from exitserve.bench.memory import weight_bytes
from exitserve.bench.settings import BenchJob, Setting, rotated
from exitserve.costs.devices import DEVICES, device_called
from exitserve.engine.launch import runs_on_v2
from exitserve.engine.options import gpu

START_SECONDS = 40.0
"""Of an engine on two cores whose compiled code is found: processes, imports, weights, tracing."""
START_ON_GPU = 75.0
"""Of all engines, which start at the same time there: a guess; alone, one took 60 on an H100."""
EAGER = 0.6
"""Of that, what it takes without compilation."""
STEP_SECONDS, STEP_ON_GPU = 2e-3, 1e-2
"""Of a step beside reading the weights. Measured on two cores; for a GPU guessed from how long a
small model's passes took on an H200."""
ROW = 0.05
"""What a row more adds to a step on a CPU, as a share of the time that reading takes."""
GPU_BANDWIDTH = 1e12
"""Bytes a second, of a GPU whose figures are not known."""
READ = 1 / 6
"""Of the time in which a request is decoded, what the oracle takes to read its text."""
PROBE_BYTES = 2**28


def rounds_of(job: BenchJob) -> dict[int, Sequence[Setting]]:
    """The settings of each repeat, in their order; -1 is traced, and warms up."""
    timed = {repeat: rotated(job.settings, repeat) for repeat in range(job.repeats)}
    return {-1: job.settings, **timed}


def estimate(job: BenchJob, engines: int) -> dict[str, float]:
    """Seconds of each part, by its name; `engines` is how many start."""
    on_gpu, rounds = runs_on_v2(), rounds_of(job)
    start = START_ON_GPU if on_gpu else engines * START_SECONDS
    read = weight_bytes(job) / _bandwidth()
    untimed = sum(len(settings) for repeat, settings in rounds.items() if repeat < 0)
    timed = job.repeats * len(job.settings)
    rest = 0.0 if on_gpu or engines == 1 else engines * SETTLE_SECONDS  # of a round
    warm_up = passes = agreement = 0.0
    for size in job.batch_sizes:
        step = STEP_ON_GPU + read if on_gpu else STEP_SECONDS + read * (1.0 + ROW * (size - 1))
        alone, requests = job.max_tokens * step, job.requests_in_pass(size)
        once = alone * requests / size
        warm_up += untimed * once + (len(rounds) - job.repeats) * rest
        passes += timed * max(once, job.seconds) + job.repeats * rest
        if not job.synthetic:
            passes += timed * (job.seconds + alone * (size > 1))  # under load
            agreement += len(job.settings) * requests * READ * alone
    return {
        "starting": start * (EAGER if job.enforce_eager else 1.0),
        "warm-up": warm_up,
        "timed passes": passes,
        "agreement": agreement,
    }


def _bandwidth() -> float:
    """Bytes a second that this machine reads; of a GPU, by its name."""
    found = gpu()
    if found is not None:
        device = device_called(found.name)
        return GPU_BANDWIDTH if device is None else DEVICES[device].bandwidth
    memory, seconds = torch.ones(PROBE_BYTES // 4), []
    for _ in range(3):
        start = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - start)
    return PROBE_BYTES / min(seconds)


def announcement(
    job: BenchJob, parts: Mapping[str, float], engines: int, share: float | None
) -> str:
    """One paragraph on what is about to happen.

    Args:
        job: of the comparison.
        parts: from `estimate`.
        engines: that start.
        share: of the GPU's memory that each gets; None on a CPU.
    """
    first = "" if job.enforce_eager else " (a minute more if not compiled before)"
    told = [f"{name} {_rounded(seconds)}" for name, seconds in parts.items() if seconds]
    told[0] = f"starting {engines} engines {_rounded(parts['starting'])}{first}"
    text = f"About {_rounded(sum(parts.values()))}: {', '.join(told)}."
    if share is None:
        return text
    shared = f"share {job.gpu_memory_utilization:g} of the GPU's memory, {share:.3f} each"
    return f"{text} The engines {shared}."


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
