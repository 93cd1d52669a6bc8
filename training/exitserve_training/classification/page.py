"""The pages: a table for the terminal, Markdown, and the plot."""

from collections.abc import Mapping
from typing import Any

from exitserve.reporting.report import cell, machine_line, markdown_page, markdown_table

HEADERS = (
    "threshold",
    "accu-\nracy",
    "F1",
    "Mat-\nthews",
    "agree-\nment",
    "mean\ndepth",
    "depth\nspeedup",
    "wall\nspeedup",
)


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """A line for each threshold, and one for the full model."""
    found = [
        [
            f"{way['threshold']:g}",
            cell(way["accuracy"], ".1%"),
            cell(way["f1"], ".1%"),
            cell(way["matthews"], ".1%"),
            cell(way["agreement"], ".1%"),
            f"{way['mean_depth']:.2f}",
            f"{way['depth_speedup']:.2f}",
            f"{way['wall_speedup']:.2f} ({way['wall_speedup_range'][0]:.2f}-"
            f"{way['wall_speedup_range'][1]:.2f})",
        ]
        for way in report["thresholds"]
    ]
    scored = [cell(report[f"full_{score}"], ".1%") for score in ("accuracy", "f1", "matthews")]
    full = ["full model", *scored, "100.0%"]
    return [*found, [*full, f"{report['num_layers']:.2f}", "1.00", "1.00"]]


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    layers = [*report["exit_layers"], report["num_layers"]]
    exits = [
        [f"{way['threshold']:g}", *[str(way["exits"][str(layer)]) for layer in layers]]
        for way in report["thresholds"]
    ]
    return markdown_page(
        f"# Classification with early exit: {report['model']}",
        f"{report['architecture']}, {report['num_layers']} layers, one classifier for all of "
        f"them. {report['inputs']:,} inputs in batches of {report['batch_size']}, "
        f"{report['threads']} threads. Wall speedup: the model's own forward over early exit, "
        f"the same batches in turn, median of {report['repeats']} rounds and their range.",
        markdown_table(HEADERS, rows(report)),
        "Inputs by the depth they stopped at:",
        markdown_table(["threshold", *[f"layer {layer}" for layer in layers]], exits),
        machine_line(report),
    )
