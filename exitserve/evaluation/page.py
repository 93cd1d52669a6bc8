"""An evaluation for readers: Markdown page, terminal tables, plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exitserve.reporting.report import (
    cell,
    columns,
    legend_below,
    machine_line,
    markdown_page,
    markdown_table,
    new_figure,
)
from exitserve.settings import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSY = (
    "Early exit is lossy: modes confidence and defer do not preserve full depth's distribution, "
    "and trade quality for depth. Measure the loss on your own tasks before you serve it."
)
LOSSLESS = "Only mode verify was measured, whose answers are those of full depth."

DRAFTING_LEGEND = (
    "Tokens that a step gives, on average, if the layers up to an exit draft k tokens and full "
    "depth judges them: the accepted drafts, and one more. Every token is drafted, whatever its "
    "confidence. Right: the share of tokens for which the exit agrees with full depth; `exitserve "
    "plan` tells which wall speedup that allows."
)
DRAFTING_TITLE = "tokens a step, if the first layers drafted (mode verify)"


def text_table(cases: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headers, and a row for each case. In a terminal the table fits 80 characters."""
    rows = [
        {
            "setting": _label(case),
            "mean\ndepth": cell(case["mean_depth"], ".2f"),
            "depth\nspeedup": cell(case["depth_speedup"], ".2f"),
            "agree-\nment": cell(case["agreement"], ".3f"),
            "perplexity": cell(case["perplexity"], ".3f"),
            "perplexity\nretained": cell(case["perplexity_retention"], ".1%"),
        }
        for case in cases
    ]
    return columns(rows)


def depth_rows(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row of texts by their headers for each case with exits and each depth."""
    return [
        {
            "setting": _label(case),
            "depth": str(part["depth"]),
            "share of tokens": cell(part["share"], ".1%"),
            "agreement": cell(part["agreement"], ".3f"),
            "perplexity": cell(part["perplexity"], ".3f"),
        }
        for case in cases
        if case["mode"] not in ("off", "verify")
        for part in case["by_depth"]
    ]


def drafting_table(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, one for each exit layer: its agreement, and the tokens of a step by
    drafts made."""
    drafts = (step["drafts"] for step in data["drafting"][0]["steps"])
    headers = ["exit layer", "right", *(f"k = {count}" for count in drafts)]
    return headers, [
        [
            str(one["exit_layer"]),
            cell(one["agreement"], ".3f"),
            *(cell(step["tokens_per_step"], ".2f") for step in one["steps"]),
        ]
        for one in data["drafting"]
    ]


def title_of(data: Mapping[str, Any]) -> str:
    """Names the model."""
    return f"{data['model']}, quality against depth"


def warning_of(data: Mapping[str, Any]) -> str:
    """Whether the measured settings change answers."""
    modes = {case["mode"] for case in data["cases"]} - {"off"}
    return LOSSLESS if modes == {"verify"} else LOSSY


def markdown(data: Mapping[str, Any]) -> str:
    """The page `report.md`."""
    cases = data["cases"]
    parts = [markdown_table(*text_table(cases)), "![retained quality](retention.png)"]
    if by_depth := depth_rows(cases):
        parts.append("## By the depth at which tokens stopped")
        parts.append(markdown_table(*columns(by_depth)))
    if data["drafting"]:
        parts += ["## Several tokens a step", DRAFTING_LEGEND]
        parts.append(markdown_table(*drafting_table(data)))
    return markdown_page(
        f"# {title_of(data)}",
        f"> **Warning.** {warning_of(data)}",
        "## Held-out text",
        *parts,
        "## How it was measured",
        _conditions(data),
    )


def _conditions(data: Mapping[str, Any]) -> list[str]:
    settings = data["settings"]
    text = settings["data"]
    return [
        f"Text: {text['name']} (sha256 {text['sha256'][:16]}, {text['documents']} documents), "
        f"{settings['windows']} windows of {settings['window_tokens']} tokens, the first "
        f"{settings['prompt_tokens']} of each as prompt: {settings['decode_tokens']} decode "
        f"tokens. Teacher forced and exact, in float32.",
        "Agreement: share of tokens equal to full depth's greedy choice on the same text. "
        "Perplexity: of the text, by the logits of the depth at which each token stopped; in the "
        "table by depth, over the tokens that stopped there: at exits, the easy ones.",
        "Retained: score over full depth's (the inverse where less is better).",
        f"Exit layers {settings['exit_layers']} of {settings['num_layers']}, confidence by "
        f"{settings['criterion']}, exit rows {settings['exit_rows']}. Nothing was timed; "
        f"depth speedup counts layers.",
        f"{machine_line(data)}.",
    ]


def _label(case: Mapping[str, Any]) -> str:
    return "full depth" if case["mode"] == "off" else label_of(case)


def plot(data: Mapping[str, Any]) -> Figure:
    """What is retained of full depth, against depth speedup.

    One panel for each mode; every line begins at full depth.
    """
    full, *others = data["cases"]
    modes = list(dict.fromkeys(case["mode"] for case in others))
    figure = new_figure(title_of(data), 1.6 + 4.8 * len(modes), 4.8)
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        _draw(panel, [full, *(case for case in others if case["mode"] == mode)])
        panel.set_title(mode, fontsize=10)
    panels[0].set_ylabel("retained of full depth, %")
    legend_below(figure, panels[0])
    return figure


def _draw(panel: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    lines = {
        "agreement, held-out text": [(c["depth_speedup"], c["agreement"]) for c in cases],
        "perplexity, held-out text": [
            (c["depth_speedup"], c["perplexity_retention"]) for c in cases
        ],
    }
    for name, points in lines.items():
        known = sorted((x, 100 * y) for x, y in points if x is not None and y is not None)
        panel.plot([x for x, _ in known], [y for _, y in known], marker="o", label=name)
    panel.axhline(100, color="silver", linewidth=1, zorder=0)
    panel.set_xlabel("depth speedup (layers at full depth / mean depth)")
    panel.grid(alpha=0.25)
