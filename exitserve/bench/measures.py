"""From timed passes to the numbers of a report. Pure arithmetic, no engine."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exitserve.costs.byte_costs import DecoderShape, DecodeStep, limit_of_reads, limit_speedup
from exitserve.errors import ExitServeError
from exitserve.reporting.report import rounded
from exitserve.settings import Setting, label_of

NOISE = 0.02
"""A wall speedup of equal work may miss 1 by this share and still count as noise."""
BESIDE_BYTES = 0.1
"""A wall speedup may exceed its limit by this share, and by what exits off shows: on a CPU our
steps take fewer and shorter calls than plain vLLM's, which bytes do not count."""
SEVERAL = 1.1
"""Mean tokens at once above which steps give several; now and then two arrive together anyway."""
UNSTEADY = 1.25
"""If repeats of a setting differ by more than this factor, the machine was unsteady."""


@dataclass(frozen=True)
class Timing:
    """Decoding of one or more batches, prompt processing left out."""

    tokens: int
    seconds: float
    gaps: tuple[float, ...]
    """Seconds between successive tokens of a request."""
    arrivals: int = 0
    """How often tokens of a request came; less than `tokens` where several come in one step."""

    @property
    def rate(self) -> float:
        """Tokens per second over all requests of a batch together."""
        return self.tokens / self.seconds


def timing_of(times: Sequence[Sequence[float]]) -> Timing:
    """Times the decoding of one batch.

    It starts when every request has its first token, so that no prompt is being processed, and
    ends when the first request has its last, so that the batch is full throughout. (Long prompts
    are processed one after the other, while earlier requests decode already.)

    Args:
        times: [B] moments in seconds at which each request's tokens arrived.

    Raises:
        ExitServeError: a request had ended before every other had its first token.
    """
    start = max(request[0] for request in times)
    end = min(request[-1] for request in times)
    if end <= start:
        raise ExitServeError(
            f"a request of {len(times[0])} tokens ended before the prompts of its batch of "
            f"{len(times)} were processed, so the full batch was never decoding: raise "
            f"--max-tokens, or shorten the prompts."
        )
    gaps = tuple(gap for request in times for gap in _gaps(request, start, end))
    arrivals = sum(len({time for time in request if start < time <= end}) for request in times)
    return Timing(tokens=len(gaps), seconds=end - start, gaps=gaps, arrivals=arrivals)


def _gaps(times: Sequence[float], start: float, end: float) -> Iterator[float]:
    """Seconds for each token of a request in (start, end]; tokens that come together share them."""
    moments = list(dict.fromkeys(times))
    for earlier, later in itertools.pairwise(moments):
        if start < later <= end:
            count = times.count(later)
            yield from itertools.repeat((later - earlier) / count, count)


def joined_timing(timings: Iterable[Timing]) -> Timing:
    """The timing of several batches together."""
    parts = list(timings)
    return Timing(
        tokens=sum(part.tokens for part in parts),
        seconds=sum(part.seconds for part in parts),
        gaps=tuple(gap for part in parts for gap in part.gaps),
        arrivals=sum(part.arrivals for part in parts),
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """`median`, `min` and `max`."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def steps_of(depths: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[DecodeStep]:
    """The decode steps of one batch whose requests all started together.

    Args:
        depths: [B] depths of each request's decode tokens.
        prompt_lengths: [B].
    """
    return [
        DecodeStep(
            depths=tuple(row),
            # Attention reads the prompt and the generated tokens so far, its own included.
            contexts=tuple(length + index + 1 for length in prompt_lengths),
        )
        for index, row in enumerate(zip(*depths, strict=True))
    ]


READS = "layers", "checks", "heads"
"""Reads of the weights of layers, of the exit rows (by checks and drafts), of the whole head."""
DRAFTS = "drafted", "accepted", "drafted_from_text", "accepted_from_text"
"""Tokens drafted, those accepted, and what of these was of the requests' own text."""


@dataclass(kw_only=True)
class Measurements:
    """What was measured of one setting at one batch size."""

    setting: Setting
    batch_size: int
    requests: int
    """How many requests a pass sends."""
    depths: list[int] = field(default_factory=list)
    """Depth of every decode token of the traced pass. A request's first token comes from the
    prompt pass, always at full depth; it is neither counted nor timed."""
    steps: list[DecodeStep] = field(default_factory=list)
    checks: int = 0
    """Exit checks that the engine made in the traced pass; each reads the exit rows once."""
    sequences: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(prompt, generated) of every request of the traced pass."""
    repeats: list[Timing] = field(default_factory=list)
    loads: list[Timing] = field(default_factory=list)
    """Of each repeat, under a steady load; none with synthetic weights."""
    agreement: float | None = None
    perplexity: float | None = None
    """Perplexity of the generated text under the full-depth model."""
    layers_later: int = 0
    """Layers run for tokens beyond their depth: deferred ones, and those of rejected drafts."""
    reads: list[dict[str, float]] = field(default_factory=list)
    """Of each repeat, as counted by an engine that may give several tokens in a step: `READS`, each
    for all tokens of a step together, for one token of each request, on average."""
    drafts: dict[str, int] | None = None
    """`DRAFTS`; None in modes without drafts."""


def case_of(
    measured: Measurements, plain: Measurements, shape: DecoderShape, exit_layers: Sequence[int]
) -> dict[str, Any]:
    """One entry of the report's `cases`.

    Args:
        measured: the setting.
        plain: plain vLLM at the same batch size; repeat r of both ran close together.
        shape: for the limit and the full depth.
        exit_layers: the model's; the case lists all, used or not.
    """
    timed = joined_timing(measured.repeats)
    gaps = [1e3 * gap for gap in timed.gaps]
    full = shape.num_layers
    limit = _limit(measured, shape)
    wall = spread(_ratios(measured.repeats, plain.repeats))
    loads = _ratios(measured.loads, plain.loads)
    return {
        "batch_size": measured.batch_size,
        "mode": measured.setting.mode,
        "rival": measured.setting.rival,
        "exit_threshold": measured.setting.exit_threshold,
        "exit_layer": measured.setting.exit_layer,
        "tokens_per_second": round(statistics.median(t.rate for t in measured.repeats), 2),
        "tpot_ms": {
            "median": round(statistics.median(gaps), 3),
            "p99": round(float(np.percentile(gaps, 99)), 3),
        },
        "tokens_at_once": round(timed.tokens / timed.arrivals, 3),
        "mean_depth": round(statistics.fmean(measured.depths), 4),
        "mean_layers_run": round(
            statistics.fmean(measured.depths) + measured.layers_later / len(measured.depths), 4
        ),
        "depth_speedup": round(full * len(measured.depths) / sum(measured.depths), 4),
        "wall_speedup": wall,
        "load_wall_speedup": spread(loads) if loads else None,
        "limit_speedup": rounded(limit),
        "efficiency": None if limit is None else round(wall["median"] / limit, 4),
        "agreement": rounded(measured.agreement),
        "perplexity": rounded(measured.perplexity),
        **(measured.drafts or dict.fromkeys(DRAFTS)),
        "exit_layers": {
            str(layer): measured.depths.count(layer) for layer in sorted({*exit_layers, full})
        },
    }


def _limit(measured: Measurements, shape: DecoderShape) -> float | None:
    """What reads of weights would allow; None where they give drafts and nobody counted them."""
    if measured.reads:
        means = {kind: statistics.fmean(one[kind] for one in measured.reads) for kind in READS}
        return limit_of_reads(shape, measured.steps, **means)
    if measured.drafts is not None:
        return None
    return limit_speedup(shape, measured.steps, measured.checks)


def _ratios(mine: Sequence[Timing], theirs: Sequence[Timing]) -> list[float]:
    """Wall speedup in each repeat."""
    return [own.rate / other.rate for own, other in zip(mine, theirs, strict=True)]


def notes_on(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """Warnings about results that a reader should not take at face value."""
    notes, unsteady, shared = [], [], []
    cases = list(cases)
    # A step may be shorter than plain vLLM's for the same work, and is with exits too then.
    off = {c["batch_size"]: c["wall_speedup"]["median"] for c in cases if c["mode"] == "off"}
    for case in cases:
        where = f"{label_of(case)} at batch {case['batch_size']}"
        wall, limit = case["wall_speedup"], case["limit_speedup"]
        own = 1.0 if case["mode"] == "off" else max(1.0, off.get(case["batch_size"], 1.0))
        above = limit is not None and wall["min"] > limit * own * (1.0 + BESIDE_BYTES)
        if above and case["tokens_at_once"] > SEVERAL:
            shared.append(where)
        elif above:
            notes.append(f"{where}: wall speedup is above the limit: check the measurement.")
        elif wall["max"] > wall["min"] * UNSTEADY:
            unsteady.append(f"{where} ({wall['min']:.2f} to {wall['max']:.2f})")
        elif case["mode"] == "off" and wall["max"] < 1.0 - NOISE:
            notes.append(
                f"{where}: wall speedup {wall['median']:.2f} for the same work: exitserve has "
                f"overhead there. Compare the other settings with this one."
            )
    if shared:
        notes.append(
            f"wall speedup is above the limit for {'; '.join(shared)}. The limit counts bytes; a "
            f"step there gives several tokens, which share its other work too."
        )
    if unsteady:
        notes.append(
            f"the machine was busy or unsteady: wall speedup of repeats differs by more than a "
            f"factor of {UNSTEADY} for {'; '.join(unsteady)}. Do not quote these; run again on a "
            f"quiet machine, with more --repeats."
        )
    return notes
