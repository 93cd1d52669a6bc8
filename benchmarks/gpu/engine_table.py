"""The stage of engines: early exit beside plain vLLM, on random weights.

The limit is that of bytes (`exitserve.costs.byte_costs`): what a step at full depth must read, over
what the steps read as they happened.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sessions import Contender, Found, Seen, decoder, measure
from shapes import DRAFTERS, SHAPES, TINY, TINY_DRAFTS, EngineCase, Shape
from stages import StageError, StageOutcome, StageRun, say

from exitserve.bench.measures import spread, steps_of
from exitserve.costs.byte_costs import (
    DecoderShape,
    DecodeStep,
    full_depth,
    limit_speedup,
    step_bytes,
)
from exitserve.reporting.report import markdown_table
from exitserve.settings import PLAIN

HEADERS = [
    "case",
    "batch x prompt",
    "plain ms",
    "ms",
    "speed (range)",
    "limit",
    "layers",
    "exit heads",
    "target",
    "verdict",
]
FAR_OFF = 0.1
"""Of all layers: depths that are this far from what was ordered were not ordered."""
LEAST_SECONDS = 60
"""A phase is not begun with less time than this."""


def engines(run: StageRun) -> StageOutcome:
    """Every shape, every phase; what fails or is left out is said."""
    outcome = StageOutcome({"synthetic": True, "shapes": {}})
    for shape in _shapes(run):
        before = outcome.page
        rows: list[dict[str, Any]] = []
        facts: list[dict[str, Any]] = []
        outcome.data["shapes"][shape.name] = {"cases": rows, "phases": facts}
        for phase in shape.phases[: 1 if run.quick else None]:
            chosen = phase[:2] if run.quick else phase
            try:
                found = _measured(run, shape, chosen)
            except Exception as error:  # noqa: BLE001  # the other phases still run
                labels = ", ".join(case.label for case in chosen)
                outcome.failures.append(f"{shape.name}: {labels}: {error}")
                continue
            own = [_case(run, shape, case, found) for case in chosen]
            rows += own
            facts.append({"together": found.together, "engines": found.engines})
            outcome.failures += _failures(shape, found, own)
            outcome.page = f"{before}{_page(shape, rows, facts)}\n\n"
            run.publish("engines", outcome)
        outcome.verdict += _verdict_lines(shape, rows)
        say(f"{shape.name}: done")
    return outcome


def _shapes(run: StageRun) -> list[Shape]:
    if not run.tiny:
        return [SHAPES[name] for name in run.shapes]
    tiny = [TINY_DRAFTS if name.endswith("-drafts") else TINY for name in run.shapes]
    return [shape for shape in (TINY, TINY_DRAFTS) if shape in tiny]


def _measured(run: StageRun, shape: Shape, cases: Sequence[EngineCase]) -> Found:
    """A phase's passes; raises `StageError` where there is no time for it."""
    left = run.deadline - time.monotonic()
    if left < LEAST_SECONDS:
        raise StageError(f"left out, with {max(0.0, left):.0f} s to go: run it by itself.")
    folder = Path(tempfile.mkdtemp(prefix=f"{shape.name}-", dir=run.folder))
    return measure(run, shape, cases, folder)


def _failures(shape: Shape, found: Found, rows: Iterable[dict[str, Any]]) -> list[str]:
    failed = [f"{shape.name}, engine {name}, {text}" for name, text in found.failures.items()]
    return failed + [
        f"{shape.name}, {row['case']}: {row['mean_depth']:.1f} layers run for a token, not "
        f"{row['layers_ordered']:.1f}; this is another case than it says."
        for row in rows
        if not row.get("as_ordered", True)
    ]


def _case(run: StageRun, shape: Shape, case: EngineCase, found: Found) -> dict[str, Any]:
    """A row, for the JSON file; without `speed` where an engine failed."""
    plain = found.seen.get(Contender("plain", PLAIN, case.work))
    own = found.seen.get(Contender(case.engine, case.setting, case.work))
    row: dict[str, Any] = {
        "case": case.label,
        "engine": case.engine,
        "setting": case.setting.label,
        "batch": case.work.batch,
        "prompt_tokens": case.work.prompt_tokens,
        "max_tokens": case.work.max_tokens,
        "target": case.target,
        "layers_ordered": case.layers,
        "interleaved": case.engine in found.together,
    }
    if plain is None or own is None or not plain.timings or not own.timings:
        return row
    # An engine may have failed before its last round.
    pairs = list(zip(own.timings, plain.timings, strict=False))
    steps = case.work.max_tokens - 1
    same = _same_share(own, plain) if case.same_tokens else None
    depth = statistics.fmean(_depths(shape, case, own))
    return row | {
        "speed": spread([mine.rate / its.rate for mine, its in pairs]),
        "plain_ms": _milliseconds(its.gaps for _, its in pairs),
        "ms": _milliseconds(mine.gaps for mine, _ in pairs)
        if not case.drafts
        else round(1e3 * case.work.batch / statistics.median(mine.rate for mine, _ in pairs), 4),
        "plain_tokens_per_second": [round(its.rate, 2) for _, its in pairs],
        "tokens_per_second": [round(mine.rate, 2) for mine, _ in pairs],
        # Drafts, whose work is not that of depths, have no limit here.
        "limit": None if case.drafts else round(_limit(run, shape, case, own), 4),
        "mean_depth": round(depth, 3),
        "as_ordered": case.layers is None
        or abs(depth - case.layers) <= FAR_OFF * shape.layers_of("plain"),
        "exit_heads_per_step": round(own.traced.checks / steps, 3),
        "tokens_same": None if same is None else round(same, 4),
    }


def _milliseconds(gaps: Iterable[tuple[float, ...]]) -> float:
    """Of a decode step, for all its tokens together: the median."""
    return round(1e3 * statistics.median(gap for one in gaps for gap in one), 4)


def _same_share(own: Seen, plain: Seen) -> float:
    """Of the tokens: those that are plain vLLM's."""
    pairs = zip(own.traced.tokens, plain.traced.tokens, strict=True)
    return statistics.fmean(a == b for mine, its in pairs for a, b in zip(mine, its, strict=True))


def _depths(shape: Shape, case: EngineCase, own: Seen) -> list[int]:
    """Layers run for each decode token: the first of a request comes from its prompt."""
    if own.traced.depths is None:
        return [shape.layers_of(case.engine)]
    return [depth for request in own.traced.depths for depth in request[1:]]


def _limit(run: StageRun, shape: Shape, case: EngineCase, own: Seen) -> float:
    full, work = decoder(shape, "plain"), case.work
    rows = own.traced.depths
    if rows is None:  # a truncated model: its own full depth
        rows = [(full.num_layers,) * work.max_tokens] * work.batch
    steps = steps_of([request[1:] for request in rows], [work.prompt_tokens] * work.batch)
    if own.traced.depths is None:
        return _bytes(full, steps) / _bytes(decoder(shape, case.engine), steps)
    options = shape.exits(case.engine, both=run.both_exits) or {}
    layers = options.get("exit_layers", [])
    return limit_speedup(full, [replace(s, checks=_heads(case, layers, s)) for s in steps])


def _heads(case: EngineCase, exit_layers: Sequence[int], step: DecodeStep) -> int:
    """Reads of the head for exits that a step needs: engines check at every layer they come to."""
    if case.setting.mode == "confidence":
        return sum(layer <= max(step.depths) for layer in exit_layers)
    return int(case.setting.mode == "fixed")


def _bytes(shape: DecoderShape, steps: Sequence[DecodeStep]) -> int:
    return sum(step_bytes(shape, full_depth(shape, step)) for step in steps)


def _page(shape: Shape, cases: list[dict[str, Any]], facts: list[dict[str, Any]]) -> str:
    lines = [
        f"SYNTHETIC {shape.name}: random weights in {shape.config['dtype']}, depths by order or "
        f"by lot. Speed over plain vLLM's in the same round, median (range).",
        "",
        markdown_table(HEADERS, [_cells(row) for row in cases]),
    ]
    for phase in facts:
        told = [
            f"{name} {one['compilation']}, graphs {one['graphs']}, "
            f"{'async' if one['async_scheduling'] else 'sync'} scheduling, "
            f"started in {one['start_seconds']:.0f} s, "
            f"graphs take {one.get('graph_gib', 0.0):.2f} GiB"
            + ("" if name in phase["together"] else " (did not fit beside the others: by itself)")
            for name, one in phase["engines"].items()
        ]
        lines.append(f"Engines: {'; '.join(told)}." if told else "No engine started.")
    return "\n".join(lines)


TOLD = ("forced", "verify", "ngram", *DRAFTERS)
"""Engines whose rows are in the verdict; of "exits", those whose tokens all exit."""


def _verdict_lines(shape: Shape, rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each kind of row: speeds over plain vLLM's, by batch size."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["engine"] in TOLD or row["setting"].startswith("exit at"):
            speed = f"{row['speed']['median']:.2f}" if "speed" in row else "failed"
            work = f"{row['batch']} x {row['prompt_tokens']}"
            found.setdefault(row["case"], []).append(f"{speed} ({work})")
    return [f"{shape.name}, {case}: {', '.join(told)}" for case, told in found.items()]


def _cells(row: dict[str, Any]) -> list[str]:
    head = [row["case"], f"{row['batch']} x {row['prompt_tokens']}"]
    target = "-" if row["target"] is None else f"{row['target']:.2f}"
    if "speed" not in row:
        return [*head, *["-"] * 6, target, "failed"]
    speed = row["speed"]
    return [
        *head,
        f"{row['plain_ms']:.2f}",
        f"{row['ms']:.2f}",
        f"{speed['median']:.2f} ({speed['min']:.2f}-{speed['max']:.2f})",
        "-" if row["limit"] is None else f"{row['limit']:.2f}",
        f"{row['mean_depth']:.1f}",
        f"{row['exit_heads_per_step']:.2f}",
        target,
        _verdict(row),
    ]


def _verdict(row: dict[str, Any]) -> str:
    words = []
    if not row["as_ordered"]:
        words.append("wrong depths")
    elif row["target"] is not None:
        words.append("ok" if row["speed"]["median"] >= row["target"] else "below")
    if (same := row["tokens_same"]) is not None:
        words.append("same tokens" if same == 1 else f"{1 - same:.1%} of tokens differ")
    if not row["interleaved"]:
        words.append("not in turns")
    return ", ".join(words) or "-"
