"""From the text to what is promised for each mode: reads it, lets the model write, calibrates."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from exitserve.calibration.bounds import min_pieces
from exitserve.calibration.choice import Target
from exitserve.calibration.outcomes import Piece, Source
from exitserve.calibration.page import provenance_of, report
from exitserve.calibration.pieces import (
    PieceSplit,
    check_enough,
    independent_windows,
    model_continuations,
    split_pieces,
)
from exitserve.calibration.rows import RowsEntry, compare_rows, count_rows
from exitserve.calibration.run import CalibrationJob, CalibrationResult, Calibrator
from exitserve.calibration.unfinished import Recall
from exitserve.checkpoint.block import MultiExit
from exitserve.checkpoint.calibration import ALL, FREQUENT, Calibration
from exitserve.costs import devices
from exitserve.costs.byte_costs import serving_dtype, shape_of
from exitserve.costs.curves import StepCosts
from exitserve.costs.sources import MOST_TOKENS
from exitserve.errors import ExitServeError
from exitserve.policy import Mode
from exitserve.reference import Reference, load_reference
from exitserve.reporting.progress import StepProgress
from exitserve.windows import Documents, Window, load_tokenizer, read_documents, windows_of

AGREEMENTS = (0.9, 0.95, 0.98, 0.99)
"""Also calibrated, for requests that send `exit_target`, where the text is enough."""
SEED = 0


def targets_of(args: argparse.Namespace) -> list[Target]:
    """The target that was asked for, then those of `AGREEMENTS`."""
    if not 0.5 <= args.confidence_level < 1.0:
        raise ExitServeError(
            f"confidence_level must be from 0.5 to below 1, such as 0.95, not "
            f"{args.confidence_level:g}."
        )
    agreements = dict.fromkeys((args.target_agreement, *AGREEMENTS))
    return [Target(one) for one in agreements]


def calibrate(
    args: argparse.Namespace,
    directory: Path,
    block: MultiExit,
    config: dict[str, Any],
    targets: list[Target],
    progress: StepProgress,
    recall: Recall,
) -> tuple[Calibration, dict[str, dict[str, Any]], CalibrationResult]:
    """Reads the text and calibrates each of `args.modes`.

    Returns:
        the checkpoint's record; the reports, by their folders inside --out: the first mode's has no
        name, the others' have their modes'; and what was found for the first mode.
    """
    documents = read_documents(args.data)
    delta = 1.0 - args.confidence_level
    jobs = [_job(mode, args, block, config, targets, delta) for mode in args.modes]
    windows = _windows(args, directory, documents)
    count = round(args.generated_share * len(windows))
    text = [Piece(one.token_ids, args.prompt_tokens, "text") for one in windows[count:]]
    prompts = [window.token_ids[: args.prompt_tokens] for window in windows[:count]]

    def check(written: list[Piece]) -> PieceSplit:
        parts = split_pieces([*text, *written])
        sources = _sources(args)
        # With too little text for what was asked for, less is promised.
        easiest = max(targets, key=lambda one: one.limit)
        least = min_pieces(easiest.limit, delta)
        check_enough(parts, sources, least, documents.name, easiest.name)
        return parts

    # Before anything slow starts; and again below, since continuations may be too short to count.
    check([Piece(prompt, args.prompt_tokens, "generated") for prompt in prompts])
    reference = load_reference(
        str(directory),
        block.exit_layers,
        exit_rows=ALL,
        criterion="max_prob",
        device="auto",
        dtype=serving_dtype(config, args.dtype),
    )
    parts = check(_written(args, reference, prompts, progress, recall))
    shape = shape_of(config, serving_dtype(config, args.dtype))
    table: list[RowsEntry] = []
    if args.exit_rows == FREQUENT and shape.exit_rows is not None:
        # The text of the test has no part in this.
        counted = (*parts.count, *parts.select)
        table = compare_rows(reference, parts.count, parts.select, shape)
        rows = count_rows(reference, counted, shape.exit_rows)
        reference = reference.variant(reference.criterion, rows)
    found = Calibrator(reference, jobs[0], progress, recall).calibrate(parts)
    # One checkpoint has one criterion.
    others = [
        Calibrator(reference, job, progress, recall).calibrate(parts, [found.criterion])
        for job in jobs[1:]
    ]
    found = replace(found, rows_table=table)
    source = provenance_of(documents, parts, args)
    records: list[Calibration] = []
    reports: dict[str, dict[str, Any]] = {}
    for job, result in zip(jobs, (found, *others), strict=True):
        record = result.calibration(job, source)
        folder = "" if job is jobs[0] else job.mode
        reports[folder] = report(args.model_name, block.exit_layers, job, result, record)
        records.append(record)
    return records[0].beside(records[1:]), reports, found


def _job(
    mode: Mode,
    args: argparse.Namespace,
    block: MultiExit,
    config: dict[str, Any],
    targets: list[Target],
    delta: float,
) -> CalibrationJob:
    costs = _costs(args, config)
    return CalibrationJob(
        target=targets[0],
        others=tuple(targets[1:]),
        mode=mode,
        delta=delta,
        costs=costs if args.exit_rows == FREQUENT else replace(costs, check=costs.head),
        fewest_ends=min_pieces(targets[0].limit, delta),
        most_tokens=args.window - args.prompt_tokens,
    )


def _costs(args: argparse.Namespace, config: dict[str, Any]) -> StepCosts:
    """What the parts of a step cost in bytes, at a context of half a window."""
    shape = shape_of(config, serving_dtype(config, args.dtype))
    return devices.roofline(shape, devices.BYTES, args.window // 2, MOST_TOKENS)


def _windows(args: argparse.Namespace, directory: Path, documents: Documents) -> list[Window]:
    tokenizer = load_tokenizer(directory)
    every = windows_of(documents, tokenizer, args.window, limit=sys.maxsize, seed=SEED)
    return independent_windows(every, args.windows, SEED, running=documents.running)


def _sources(args: argparse.Namespace) -> list[Source]:
    text: list[Source] = ["text"] if args.generated_share < 1.0 else []
    return [*text, "generated"] if args.generated_share > 0.0 else text


def _written(
    args: argparse.Namespace,
    reference: Reference,
    prompts: list[tuple[int, ...]],
    progress: StepProgress,
    recall: Recall,
) -> list[Piece]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("the model writes", done, len(prompts))

    tokens = args.window - args.prompt_tokens
    return model_continuations(reference, prompts, tokens, args.temperature, SEED, advance, recall)
