"""The report of a calibration: the block for the checkpoint, tables, and plots."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.calibration.bounds import min_pieces
from exitserve.calibration.choice import Choice, relative_cost
from exitserve.calibration.outcomes import summarise
from exitserve.calibration.pieces import PieceSplit
from exitserve.calibration.run import CalibrationJob, CalibrationResult
from exitserve.calibration.scores import ExitScores
from exitserve.checkpoint.calibration import Calibration, json_of
from exitserve.reporting.report import (
    machine,
    machine_line,
    markdown_page,
    markdown_table,
    publish,
    terminal_table,
    versions,
)
from exitserve.windows import Documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHOD = (
    "Learn then Test (arXiv 2110.01052): fixed-sequence testing along choices ordered on other "
    "text, p-values by betting (Waudby-Smith and Ramdas 2024)"
)
BINS = 10
_NO_POINT = dict.fromkeys(("agreement", "thresholds", "eos_thresholds", "found"))
HEADERS = ("target", "agreement", "mean depth", "perplexity", "cost")


def report(
    model: str,
    exit_layers: Sequence[int],
    job: CalibrationJob,
    found: CalibrationResult,
    calibration: Calibration,
) -> dict[str, Any]:
    """The report without its `schema_version`; see docs/calibrate.md for the keys."""
    return {
        "command": "calibrate",
        "model": model,
        "machine": machine(),
        "versions": versions(),
        "num_layers": job.costs.num_layers,
        "exit_layers": list(exit_layers),
        "calibration": json_of(calibration),
        "promised": [
            {
                "target": one.target.name,
                "kept": one.point is not None,
                "choices_kept": one.kept,
                "pieces_needed": min_pieces(one.target.limit, job.delta),
                **(_NO_POINT if one.point is None else json_of(one.point)),
            }
            for one in found.promised
        ],
        "curves": {
            name: [_choice(one, job) for one in curve] for name, curve in found.curves.items()
        },
        "reliability": {
            str(layer): reliability(scores, found.criterion)
            for layer, scores in found.scores.items()
        },
        "exit_rows": [asdict(one) for one in found.rows_table],
    }


def provenance_of(
    documents: Documents, parts: PieceSplit, args: argparse.Namespace
) -> dict[str, Any]:
    """The text, how it was used, the date, and the versions."""
    sources = ("text", "generated")
    return {
        "data": documents.provenance(),
        "method": METHOD,
        "windows": {
            name: {source: sum(one.source == source for one in pieces) for source in sources}
            for name, pieces in vars(parts).items()
        },
        "window_tokens": args.window,
        "prompt_tokens": args.prompt_tokens,
        "temperature": args.temperature,
        "dtype": args.dtype,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
    }


def _choice(choice: Choice, job: CalibrationJob) -> dict[str, Any]:
    found = summarise(choice.outcomes)
    return {
        "thresholds": {str(layer): value for layer, value in choice.proposal.thresholds},
        "agreement": round(found.agreement, 5),
        "mean_depth": round(found.mean_depth, 4),
        "perplexity": round(found.perplexity, 4),
        "full_depth_perplexity": round(found.full_perplexity, 4),
        "cost": round(relative_cost(choice, found, job.costs, job.mode), 4),
    }


def reliability(scores: ExitScores, criterion: str) -> list[dict[str, float | int]]:
    """Share of tokens equal to full depth's, by confidence, in `BINS` bins of equal width."""
    confidence = scores.confidence[criterion]
    found: list[dict[str, float | int]] = []
    for index in range(BINS):
        low, high = index / BINS, (index + 1) / BINS
        within = (confidence >= low) & ((confidence < high) | (index == BINS - 1))
        count = int(within.sum())
        if count:
            found.append(
                {
                    "confidence": round(float(confidence[within].mean()), 4),
                    "agreement": round(float(scores.agrees[within].double().mean()), 4),
                    "tokens": count,
                }
            )
    return found


def show_report(out: Path, data: Mapping[str, Any]) -> None:
    """Writes the report, and prints its short table."""
    calibration = data["calibration"]
    title = (
        f"criterion {calibration['criterion']}, mode {calibration['mode']}, confidence level "
        f"{calibration['confidence_level']:g}"
    )
    shown = [
        terminal_table(title, HEADERS, rows(data)),
        *choices(data),
        *(f"Warning: {line}" for line in warnings(data)),
    ]
    figures = {"pareto": pareto(data), "reliability": reliability_plot(data)}
    publish(out, data, markdown(data), figures, shown)


def rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each target, in the order of `HEADERS`."""
    table: list[tuple[str, ...]] = []
    for one in data["promised"]:
        if not one["kept"]:
            table.append((one["target"], "full depth", "", "", ""))
            continue
        found = one["found"]
        rise = found["perplexity"] / found["full_depth_perplexity"] - 1.0
        table.append(
            (
                one["target"],
                f"{found['agreement']:.4f}",
                f"{found['mean_depth']:.2f} of {data['num_layers']}",
                f"{found['perplexity']:.2f} ({rise:+.2%})",
                f"{found['cost']:.3f}",
            )
        )
    return table


def choices(data: Mapping[str, Any]) -> list[str]:
    """One line of thresholds for each target."""
    lines = []
    for one in data["promised"]:
        exits = [f"{layer} above {value:.3f}" for layer, value in (one["thresholds"] or {}).items()]
        ends = [value < 1.0 for value in (one["eos_thresholds"] or {}).values()]
        if exits:
            also = ", ends of sequence too" if any(ends) else ""
            if "drafts" in one["found"]:
                count, accepted = one["found"]["drafts"], one["found"]["accepted"]
                also += f"; drafts there: {count:g} at a time, of which {accepted:.1%} are accepted"
            lines.append(f"{one['target']}: exit at {', at '.join(exits)}{also}")
    return lines


def warnings(data: Mapping[str, Any]) -> list[str]:
    """What a reader must know before relying on the promises."""
    lines = []
    first, chosen = data["promised"][0], data["calibration"]["target"]
    if not first["kept"]:
        instead = "full depth"
        if chosen != first["target"]:
            instead = f"{chosen}, the strictest that could"
        other = "" if data["calibration"]["mode"] == "defer" else "--mode defer or "
        lines.append(
            f"no thresholds that cost less than full depth could be shown to keep "
            f"{first['target']} on this text, so `auto` means {instead}. {_too_little(data)}"
            f"pareto.png shows what this model gives; {other}an easier target allows more, on text "
            f"that no calibration has used yet."
        )
    missing = [one["target"] for one in data["promised"][1:] if not one["kept"]]
    if missing:
        lines.append(
            f"no thresholds could be shown to keep {', '.join(missing)}: requests that ask for it "
            f"get those of a stricter target, or full depth."
        )
    return lines


def _too_little(data: Mapping[str, Any]) -> str:
    """How much text the first target needs, where that was not given; else nothing."""
    needed = data["promised"][0]["pieces_needed"]
    tested = data["calibration"]["provenance"]["windows"]["test"].values()
    given = min((count for count in tested if count), default=0)
    if given >= needed:
        return ""
    return (
        f"Its test needs {needed} windows of each kind even if all are perfect (about three times "
        f"as many if they are not), and had {given}. "
    )


def markdown(data: Mapping[str, Any]) -> str:
    """The page `report.md`."""
    calibration = data["calibration"]
    provenance = calibration["provenance"]
    return markdown_page(
        f"# Calibration of {data['model']}",
        f"Criterion {calibration['criterion']}, mode {calibration['mode']}. Each target holds by "
        f"itself, with a confidence of {calibration['confidence_level']:g}, on windows of "
        f"{provenance['window_tokens']} tokens {' and '.join(_tested(provenance))}. They had no "
        f"part in the choice.",
        markdown_table(HEADERS, rows(data)),
        choices(data),
        "Agreement, depth and perplexity were measured on the test's text. Cost is that of an "
        "average token as a share of a full-depth token, at batch 1. It is not a wall speedup: "
        "measure that with `exitserve bench --thresholds auto`.",
        *(f"**Warning**: {line}" for line in warnings(data)),
        "![cost against agreement and perplexity](pareto.png)",
        "![agreement against confidence](reliability.png)",
        *rows_table(data),
        f"Method: {provenance['method']}.",
        f"Made on {machine_line(data)}.",
    )


def rows_table(data: Mapping[str, Any]) -> list[str]:
    """What a check gives and costs with more rows of the head or fewer; nothing where the
    vocabulary is small."""
    if not data["exit_rows"]:
        return []
    headers = ("rows", "exit", "threshold", "pass", "agreement", "whole head's", "layers")
    cells = [
        (
            f"{one['rows']:,}" + (" (chosen)" if one["chosen"] else ""),
            str(one["exit_layer"]),
            f"{one['threshold']:.3f}",
            f"{one['passes']:.3f}",
            *(
                "" if share is None else f"{share:.3f}"
                for share in (one["agreement"], one["same_token"])
            ),
            f"{one['layers']:.2f}",
        )
        for one in data["exit_rows"]
    ]
    return [
        "Rows of the head that a check may read, those of the most frequent tokens: at each exit, "
        "the share of tokens whose confidence passes, and of these the share that is full depth's "
        "token and the share that is the token of the exit's whole head; what a check costs, in "
        "layers.",
        markdown_table(headers, cells),
    ]


def _tested(provenance: Mapping[str, Any]) -> list[str]:
    """Describes the text of the test."""
    windows, data = provenance["windows"]["test"], provenance["data"]
    name = f"`{data['name']}` (sha256 {data['sha256'][:12]}...)"
    found = []
    if windows["text"]:
        found.append(f"like {windows['text']} of {name}")
    if windows["generated"]:
        found.append(
            f"like {windows['generated']} that full depth wrote, at temperature "
            f"{provenance['temperature']:g}, after prompts from {name}"
        )
    return found


def pareto(data: Mapping[str, Any]) -> Figure:
    """Cost against agreement and perplexity: choices jump between layers, so no lines join them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, curve in data["curves"].items():
        style = {"marker": "o", "markersize": 4, "linestyle": "none", "label": name}
        left.plot([one["cost"] for one in curve], [one["agreement"] for one in curve], **style)
        right.plot([one["cost"] for one in curve], [_rise(one) for one in curve], **style)
    promised = [one["found"] for one in data["promised"] if one["kept"]]
    for axes, values in (
        (left, [one["agreement"] for one in promised]),
        (right, [_rise(one) for one in promised]),
    ):
        costs = [one["cost"] for one in promised]
        axes.plot(costs, values, "k*", markersize=9, label="promised")
        axes.set_xlabel("cost of a token, share of full depth")
        axes.grid(alpha=0.3)
    left.set_ylabel("agreement with full depth")
    right.set_ylabel("perplexity, rise in %")
    left.legend()
    return figure


def _rise(one: Mapping[str, float]) -> float:
    return 100.0 * (one["perplexity"] / one["full_depth_perplexity"] - 1.0)


def reliability_plot(data: Mapping[str, Any]) -> Figure:
    """Agreement against confidence, one line for each exit layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    for layer, bins in data["reliability"].items():
        tokens: Sequence[int] = [one["tokens"] for one in bins]
        axes.plot(
            [one["confidence"] for one in bins],
            [one["agreement"] for one in bins],
            marker="o",
            markersize=4,
            label=f"exit at {layer} ({sum(tokens):,} tokens)",
        )
    axes.set_xlabel(f"confidence ({data['calibration']['criterion']})")
    axes.set_ylabel("share equal to full depth")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
