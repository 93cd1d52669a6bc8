"""A plan for readers: terminal tables, Markdown page, plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from exitserve.planning.run import shown_layers
from exitserve.reporting.report import (
    legend_below,
    machine_line,
    markdown_page,
    markdown_table,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIB = 1024


def summary(data: Mapping[str, Any]) -> list[str]:
    """The costs of a step and whether exits can pay, in sentences."""
    cost, shape = data["costs"][0], data["shape"]
    size = cost["batch_size"]
    rate = data["source"]["bandwidth"] / 1e9
    device = data["source"].get("device")
    where = "on this machine" if data["measured"] else f"on {device}, by its figures"
    lines = [
        f"A step of batch {size} at full depth takes {cost['full_depth_ms']:.3g} ms {where} "
        f"({data['dtype']}, context {data['context']}, memory {rate:,.0f} GB/s): "
        f"{shape['num_layers']} layers of {cost['layer_ms']:.3g} ms{_bound(cost)}, the head "
        f"{cost['head_ms']:.3g} ms, the rest {cost['rest_ms']:.3g} ms.",
        f"A check costs {cost['check_in_layers']:.1f} layers{_rows(shape)}; the keys and "
        f"values of a layer not run, {cost['fill_ms'] / cost['layer_ms']:.2f} layers. A token "
        f"takes {shape['kv_bytes_per_token'] / KIB:g} KiB of the cache at any depth.",
    ]
    return lines + [_verdict_line(one, data) for one in data["verdicts"]]


def _bound(cost: Mapping[str, Any]) -> str:
    return " (bound by launches)" if cost["bound_by_launches"] else ""


def _rows(shape: Mapping[str, Any]) -> str:
    """Which rows of the head checks read."""
    if shape["exit_rows"] is None:
        return " (it reads the whole head)"
    rows, size = f"{shape['exit_rows']:,} of {shape['vocab_size']:,}", shape["check_bytes"] / 2**20
    return f" (it reads {rows} rows of the head, a copy of {size:,.0f} MiB)"


def _verdict_line(one: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    share, gain = data["plausible_share"], one["best_plausible_speedup"]
    if one["reason"] is None:
        return (
            f"Batch {one['batch_size']}: exits that skip layers can pay, up to {gain:.2f} if "
            f"{share:.0%} of the tokens exit at a quarter of the depth."
        )
    return (
        f"Batch {one['batch_size']}: exits that skip layers CANNOT pay. Even if {share:.0%} of the "
        f"tokens exited at a quarter of the depth, wall speedup would be {gain:.2f}: "
        f"{one['reason']}."
    )


def recommendation(data: Mapping[str, Any]) -> list[str]:
    """Which exit layers to train, how to serve them, and what to expect, in sentences."""
    layers = ", ".join(map(str, data["recommended"]))
    own = "the checkpoint's" if data["declared"] else "to train"
    head = f"Recommended exit layers: {layers} ({own})."
    if not data["recommended"]:
        head = "NO exit layers are recommended: nothing gains at these batch sizes."
    costs = zip(data["advice"], data["costs"], strict=True)
    return [head, *(_advice_line(one, cost, data["exit_share"]) for one, cost in costs)]


def _advice_line(one: Mapping[str, Any], cost: Mapping[str, Any], share: float) -> str:
    """Which mode to serve at a batch size, and what to expect."""
    batch, gain = f"Batch {one['batch_size']}:", f"expect wall speedup {one['wall_speedup']:.2f}"
    if one["mode"] == "off":
        return f"{batch} serve at full depth (mode off): nothing here gains{_bound(cost)}."
    if one["mode"] == "confidence":
        return (
            f"{batch} serve in mode confidence, and {gain} if {share:.0%} of the tokens exit "
            f"early (assumed), 40% of these by a quarter of the depth and 70% by half of it."
        )
    if not one["drafts"]:
        return (
            f"{batch} serve in mode verify (or defer), and {gain} where a request's text repeats."
        )
    source = "as calibrated" if one["counted"] else "assumed; after training, exitserve eval counts"
    return (
        f"{batch} serve in mode verify (or defer), where the first {one['exit_layer']} layers "
        f"draft {one['drafts']} at a time if a request's text does not, and {gain} if "
        f"{one['acceptance']:.0%} of the layers' drafts are accepted ({source})."
    )


DRAFTING_LEGEND = (
    "Several tokens a step (mode verify): a request's own text drafts where it repeats (a quarter "
    "of the steps), else the first layers do; full depth judges all drafts in one pass. Wall "
    "speedup at the best number of the layers' drafts, in parentheses, by batch size. Mode defer "
    "accepts more."
)
LEGEND = (
    "One exit layer: wall speedup over full depth if all tokens exit there, and if some do: on a "
    "CPU only active rows run on, in a GPU's graph all rows as long as one does. "
    "Break-even: share of tokens that must exit there, at the first batch size. Copies: a token "
    "that exits keeps its full space in the cache; so much of it is filled from the state at which "
    "it exited."
)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headers, which may have several lines, and rows."""


def tables(data: Mapping[str, Any]) -> list[tuple[str, Table, str]]:
    """Those of the page and the terminal: title, table, and what it says."""
    return [
        ("Exit layers together", _choice_table(data), ""),
        ("Several tokens a step", _drafting_table(data), DRAFTING_LEGEND),
        ("One exit layer (* recommended)", _layer_table(data), LEGEND),
    ]


def _choice_table(data: Mapping[str, Any]) -> Table:
    """A row for each batch size, for the best layers and for those declared."""
    rows = []
    for name, label in (("best", "best to skip layers"), ("declared", "the checkpoint's")):
        choice = data[name]
        if not choice:
            continue
        for cost in data["costs"]:
            size = cost["batch_size"]
            found = [one for one in choice["speedups"] if one["batch_size"] == size]
            cells = (f"{one['speedup']:.2f}" for one in found)
            names = ", ".join(map(str, choice["layers"]))
            rows.append([f"{names} ({label}), batch {size}", *cells])
    shares = dict.fromkeys(one["exit_share"] for one in data["best"]["speedups"])
    return ["exit layers", *(f"{share:.0%} exit" for share in shares)], rows


def _drafting_table(data: Mapping[str, Any]) -> Table:
    """A row for each draft layer: the best wall speedup, and its drafts."""
    rows: dict[int, list[str]] = {}
    for one in data["modes"]:
        named = [str(one["exit_layer"]), f"{one['acceptance']:.0%}"]
        row = rows.setdefault(one["exit_layer"], named)
        row.append(f"{one['wall_speedup']:.2f} ({one['drafts']})")
    headers = ["layers", "accepted", *(f"B={cost['batch_size']}" for cost in data["costs"])]
    return headers, list(rows.values())


def _layer_table(data: Mapping[str, Any]) -> Table:
    """A row for each exit layer shown; a star marks the best."""
    sizes, share = [cost["batch_size"] for cost in data["costs"]], f"{data['exit_share']:.0%}"
    headers = [
        "exit\nlayer",
        "break\neven",
        *(f"all\nB={size}" for size in sizes),
        *(f"{share}\nB={size}" for size in sizes),
        "copies\nKiB",
    ]
    rows = []
    for one in shown_layers(data):
        star = "*" if one["exit_layer"] in data["recommended"] else ""
        batches, even = one["batches"], one["batches"][0]["break_even_share"]
        rows.append(
            [
                f"{one['exit_layer']}{star}",
                "never" if even is None else f"{even:.0%}",
                *(f"{batch['best_speedup']:.2f}" for batch in batches),
                *(f"{batch['speedup_at_share']:.2f}" for batch in batches),
                f"{one['kv_copy_bytes_per_token'] / KIB:g}",
            ]
        )
    return headers, rows


def _cost_table(data: Mapping[str, Any]) -> Table:
    names = ("layer", "attention", "fill", "check", "head", "rest", "full_depth")
    headers = ("batch", *(f"{name.replace('_', ' ')} ms" for name in names), "check in layers")
    rows = [
        [
            str(cost["batch_size"]),
            *(f"{cost[f'{name}_ms']:.3g}" for name in names),
            f"{cost['check_in_layers']:.1f}",
        ]
        for cost in data["costs"]
    ]
    return headers, rows


def markdown(data: Mapping[str, Any]) -> str:
    """The page `report.md`."""
    found = (
        (f"## {title}", markdown_table(*table), legend) for title, table, legend in tables(data)
    )
    source, timed = data["source"], ""
    if data["measured"]:
        timed = (
            f"Timed on matrices of the model's shapes, the least of {source['rounds']} rounds in "
            f"turn, {source['threads']} threads. The rest of a step, and planning exits "
            f"({data['costs'][0]['exits_ms']:g} ms), are constants of the engine."
        )
    return markdown_page(
        f"# What exits can give: {data['model']}",
        *(f"> **Note.** {note}" for note in data["notes"]),
        [*summary(data), *recommendation(data)],
        *chain.from_iterable(found),
        "![plan](plan.png)",
        "## What the parts of a step cost",
        markdown_table(*_cost_table(data)),
        timed,
        f"{machine_line(data)}.",
    )


def plot(data: Mapping[str, Any]) -> Figure:
    """Wall speedup and break-even share against the exit layer, a line for each batch size."""
    from matplotlib.ticker import ScalarFormatter

    figure = new_figure(f"{data['model']}: what one exit layer can give", 10.5, 4.4)
    speeds, shares = figure.subplots(1, 2, sharex=True)
    for index in range(len(data["costs"])):
        _draw(speeds, shares, data, index, f"C{index}")
    speeds.set_yscale("log")
    speeds.yaxis.set_major_formatter(ScalarFormatter())
    speeds.yaxis.set_minor_formatter(ScalarFormatter())
    speeds.axhline(1.0, color="silver", linewidth=1, zorder=0)
    speeds.set_ylabel("wall speedup over full depth")
    speeds.set_title("solid: every token exits; dashed: some do; dotted: recommended", fontsize=10)
    shares.set_ylabel("share of tokens that must exit")
    shares.set_ylim(0, 1)
    shares.set_title("break-even share (no line: never)", fontsize=10)
    for panel in (speeds, shares):
        panel.set_xlabel(f"exit layer, of {data['shape']['num_layers']}")
        panel.grid(alpha=0.25)
        for layer in data["recommended"]:
            panel.axvline(layer, color="darkgrey", linewidth=1, linestyle=":", zorder=0)
    legend_below(figure, speeds)
    return figure


def _draw(speeds: Axes, shares: Axes, data: Mapping[str, Any], index: int, colour: str) -> None:
    size = data["costs"][index]["batch_size"]
    layers = [one["exit_layer"] for one in data["exit_layers"]]
    batches = [one["batches"][index] for one in data["exit_layers"]]
    look: dict[str, Any] = {
        "color": colour,
        "marker": "o" if len(layers) < 3 else "",
        # Batch sizes often coincide: the first one stays visible beneath the others.
        "linewidth": max(1.2, 4.0 - 1.2 * index),
    }
    speeds.plot(
        layers,
        [batch["best_speedup"] for batch in batches],
        **look,
        label=f"batch {size}: every token exits",
    )
    speeds.plot(
        layers,
        [batch["speedup_at_share"] for batch in batches],
        **look,
        linestyle="--",
        label=f"batch {size}: {data['exit_share']:.0%} exit",
    )
    even = [batch["break_even_share"] for batch in batches]
    known = [float("nan") if share is None else share for share in even]
    shares.plot(layers, known, **look)
