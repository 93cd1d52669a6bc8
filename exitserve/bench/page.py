"""A comparison for readers: Markdown page, terminal table, plot."""

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

SYNTHETIC = (
    "SYNTHETIC: random weights and forced exits. These numbers measure the machinery at this "
    "shape, not a model: no quality is implied, and agreement is not defined."
)


def table_rows(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row of texts by their headers for each case."""
    rows = []
    for case in cases:
        wall, load = case["wall_speedup"], case["load_wall_speedup"]
        rows.append(
            {
                "setting": label_of(case),
                "batch": str(case["batch_size"]),
                "tokens/s": f"{case['tokens_per_second']:.1f}",
                "TPOT ms median": f"{case['tpot_ms']['median']:.2f}",
                "TPOT ms p99": f"{case['tpot_ms']['p99']:.2f}",
                "mean depth": f"{case['mean_depth']:.2f}",
                "layers run": f"{case['mean_layers_run']:.2f}",
                "depth speedup": f"{case['depth_speedup']:.2f}",
                "wall speedup (min to max)": _spread(wall),
                "under load": "-" if load is None else _spread(load),
                "limit": cell(case["limit_speedup"], ".2f"),
                "efficiency": cell(case["efficiency"], ".2f"),
                "agreement": cell(case["agreement"], ".3f"),
                "perplexity": cell(case["perplexity"], ".3f"),
                "accepted": _accepted(case),
            }
        )
    return rows


def _accepted(case: Mapping[str, Any]) -> str:
    """How many drafts were accepted, and of the text."""
    if not case["drafted"]:
        return "-"
    both = f"{case['accepted']} of {case['drafted']}"
    if not case["drafted_from_text"]:
        return both
    return f"{both}; of the text {case['accepted_from_text']} of {case['drafted_from_text']}"


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def short_table(cases: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and rows that fit a terminal of 80 characters."""
    rows = []
    for case, row in zip(cases, table_rows(cases), strict=True):
        wall = case["wall_speedup"]
        rows.append(
            {
                "setting": row["setting"],
                "batch": row["batch"],
                "depth\nspeedup": row["depth speedup"],
                "wall\nspeedup": f"{wall['median']:.2f}",
                "min-max": f"{wall['min']:.2f}-{wall['max']:.2f}",
                "under\nload": cell((case["load_wall_speedup"] or {}).get("median"), ".2f"),
                "limit": row["limit"],
                "agree-\nment": row["agreement"],
            }
        )
    return columns(rows)


def title_of(data: Mapping[str, Any]) -> str:
    """Names the model, and marks a synthetic one."""
    return f"{data['model']}{' (SYNTHETIC)' if data['synthetic'] else ''}, against plain vLLM"


def markdown(data: Mapping[str, Any]) -> str:
    """The page `report.md`."""
    settings, cases, forced = data["settings"], data["cases"], ""
    if shares := settings["forced"]:
        forced = (
            f"**FORCED: a check passes with probability {shares['confidence']:g}, whatever the "
            f"threshold, and a draft is accepted with probability {shares['acceptance']:g}; the "
            f"draws are the same in every repeat.**"
        )
    return markdown_page(
        f"# Early exit: {title_of(data)}",
        f"**{SYNTHETIC}**" if data["synthetic"] else "",
        forced,
        *(f"> **Warning.** {note}" for note in data["notes"]),
        markdown_table(*columns(table_rows(cases))),
        "![wall speedup](wall_speedup.png)",
        "## Tokens by the layer they stopped at",
        _exit_table(cases),
        "## How it was measured",
        _conditions(data),
    )


def _conditions(data: Mapping[str, Any]) -> list[str]:
    settings = data["settings"]
    return [
        f"{settings['requests']} requests ({settings['prompts']}), {settings['max_tokens']} "
        f"tokens each, greedy, end of sequence ignored; in full batches (at least one), whose "
        f"requests start together.",
        f"One traced warm-up pass of each setting, then {settings['repeats']} timed repeats "
        f"without tracing, each of at least {settings['seconds']:g} s of decoding. The settings "
        f"of a repeat run one after the other, each repeat starting at another one; wall speedup "
        f"compares settings within a repeat.",
        f"All engines: {settings['dtype']}, {settings['compile']}, context "
        f"{settings['max_model_len']}, at most {settings['max_num_seqs']} sequences, prefix "
        f"caching off so that every repeat does the same work.",
        *_memory_lines(settings["gpu_memory"]),
        *_rival_lines(settings["rivals"]),
        f"Exit layers {settings['exit_layers']} of {settings['num_layers']}. All columns are "
        f"about decode tokens: a request's first token comes from the prompt pass, at full "
        f"depth, and is timed and counted under load only.",
        "TPOT is the time between successive tokens of a request. Depth speedup counts layers. "
        "Wall speedup is measured throughput over plain vLLM's. Under load it is that of all "
        "tokens while each request is replaced as it ends, with the time that prompts take. The "
        "limit is what the bytes moved would allow (-: vLLM's own drafts, or answers too short to "
        "count), and efficiency is wall speedup over it. Agreement is the share of "
        "tokens that the full-depth model in float32, fed the same text, would choose too, and "
        "perplexity is that model's of the generated text.",
        "Mean depth is where tokens stopped; layers run adds those that ran above that (defer) "
        "and those of rejected drafts. Accepted: drafts that full depth agreed with, or that "
        "stood without it (defer).",
        f"{machine_line(data)}.",
    ]


def _memory_lines(shared: Mapping[str, Any] | None) -> list[str]:
    """How the engines shared a GPU's memory."""
    if shared is None:
        return []
    return [
        f"{shared['engines']} engines shared {shared['utilization']:g} of the GPU's memory: each "
        f"had {shared['each']:.3f}."
    ]


def _rival_lines(rivals: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What other kinds of drafts need beside the model."""
    if not rivals:
        return [
            "vLLM's own drafts were not measured: `--rivals ngram` puts them beside these, and "
            "any server can have them (`vllm serve --speculative-config`)."
        ]
    return [
        f"vLLM with {name}: plain vLLM and its own speculative decoding. Beside the model, "
        f"{memory['weight_bytes'] / 1e6:.1f} MB of weights and {memory['cache_bytes_per_token']:,} "
        f"bytes of cache for each token. Mode verify needs neither."
        for name, memory in rivals.items()
    ]


def _exit_table(cases: Sequence[Mapping[str, Any]]) -> str:
    layers = list(cases[0]["exit_layers"])
    rows = [
        [label_of(case), str(case["batch_size"]), *(str(n) for n in case["exit_layers"].values())]
        for case in cases
    ]
    return markdown_table(("setting", "batch", *(f"layer {layer}" for layer in layers)), rows)


def plot(data: Mapping[str, Any]) -> Figure:
    """Wall speedup with its spread, the limit and depth speedup, a row for each setting.

    One panel for each batch size. Rows, not points in a plane: thresholds often give nearly the
    same depth, and their labels would overlap.
    """
    sizes = list(dict.fromkeys(case["batch_size"] for case in data["cases"]))
    rows = len(data["cases"]) // len(sizes)
    width, height = 2.0 + 4.8 * len(sizes), max(3.6, 1.9 + 0.42 * rows)
    figure = new_figure(title_of(data), width, height)
    panels = figure.subplots(1, len(sizes), sharex=True, squeeze=False)[0]
    for panel, size in zip(panels, sizes, strict=True):
        cases = [case for case in data["cases"] if case["batch_size"] == size]
        _draw(panel, cases, labelled=panel is panels[0])
        panel.set_title(f"batch {size}", fontsize=10)
        panel.set_xlabel("ratio to plain vLLM at full depth (no unit)")
    legend_below(figure, panels[0])
    return figure


def _draw(panel: Axes, cases: Sequence[Mapping[str, Any]], *, labelled: bool) -> None:
    rows = range(len(cases))
    walls = [case["wall_speedup"] for case in cases]
    middle = [wall["median"] for wall in walls]
    below = [wall["median"] - wall["min"] for wall in walls]
    above = [wall["max"] - wall["median"] for wall in walls]
    panel.axvline(1.0, color="silver", linewidth=1, zorder=0)
    panel.scatter(
        [case["depth_speedup"] for case in cases],
        rows,
        marker="D",
        s=34,
        facecolors="none",
        edgecolors="darkgrey",
        label="depth speedup (layers at full depth / mean depth)",
    )
    panel.scatter(
        [case["limit_speedup"] or float("nan") for case in cases],
        rows,
        marker="|",
        s=300,
        linewidths=2,
        color="C2",
        label="limit on wall speedup (bytes moved)",
    )
    panel.errorbar(
        middle,
        rows,
        xerr=(below, above),
        fmt="o",
        color="C0",
        capsize=3,
        markersize=6,
        label="wall speedup (tokens/s over plain vLLM's), median, min to max",
    )
    panel.set_yticks(rows, [label_of(case) for case in cases] if labelled else [""] * len(rows))
    panel.invert_yaxis()
    panel.margins(x=0.06, y=0.08)
    panel.grid(alpha=0.25)
    _write_agreement(panel, cases)


def _write_agreement(panel: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    if all(case["agreement"] is None for case in cases):
        return
    texts = [cell(case["agreement"], ".3f") for case in cases]
    right = panel.secondary_yaxis("right")
    right.set_yticks(range(len(cases)), texts)
    right.tick_params(length=0, labelsize=8)
    right.set_ylabel("agreement", fontsize=8)
