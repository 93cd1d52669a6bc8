"""A plan for readers: terminal tables, Markdown page, plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exitserve.planning.run import gain_of, shown_layers
from exitserve.reporting.report import machine_line, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIB = 1024


def _share(value: float | None) -> str:
    return "never" if value is None else f"{value:.0%}"


def layer_headers(data: Mapping[str, Any], most: int | None = None) -> list[str]:
    """Columns of the table of exit layers, for the first `most` batch sizes or all."""
    sizes = [cost["batch_size"] for cost in data["costs"]][:most]
    share = f"{data['exit_share']:.0%}"
    return [
        "exit\nlayer",
        "break\neven",
        *(f"all\nB={size}" for size in sizes),
        *(f"{share}\nB={size}" for size in sizes),
        *(f"masked\nB={size}" for size in sizes if size > 1),
        "copies\nKiB",
    ]


def layer_rows(data: dict[str, Any], most: int | None = None) -> list[list[str]]:
    """One row of text for each exit layer shown; a star marks the best."""
    rows = []
    for one in shown_layers(data):
        star = "*" if one["exit_layer"] in data["best"]["layers"] else ""
        batches = one["batches"][:most]
        rows.append(
            [
                f"{one['exit_layer']}{star}",
                _share(batches[0][data["way"]]["break_even_share"]),
                *(f"{batch['best_speedup']:.2f}" for batch in batches),
                *(f"{batch['compacted']['speedup_at_share']:.2f}" for batch in batches),
                *(
                    f"{batch['masked']['speedup_at_share']:.2f}"
                    for batch in batches
                    if batch["batch_size"] > 1
                ),
                f"{one['kv_copy_bytes_per_token'] / KIB:g}",
            ]
        )
    return rows


def choice_headers(data: Mapping[str, Any]) -> list[str]:
    """Columns of the table of exit layers together."""
    shares = dict.fromkeys(one["exit_share"] for one in data["best"]["speedups"])
    return ["exit layers", *(f"{share:.0%} exit" for share in shares)]


def choice_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """One row of text for each batch size, for the best layers and for those declared."""
    rows = []
    for name, label in (("best", "best here"), ("declared", "the checkpoint's")):
        choice = data[name]
        if not choice:
            continue
        for cost in data["costs"]:
            size = cost["batch_size"]
            found = [one for one in choice["speedups"] if one["batch_size"] == size]
            cells = (f"{one['speedup']:.2f}" for one in found)
            rows.append([f"{_named(choice['layers'])} ({label}), batch {size}", *cells])
    return rows


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
        f"{shape['num_layers']} layers of {cost['layer_ms']:.3g} ms, the head "
        f"{cost['head_ms']:.3g} ms, the rest {cost['rest_ms']:.3g} ms.",
        f"A check costs {cost['check_in_layers']:.1f} layers{_rows(shape)}; the keys and "
        f"values of a layer not run, {cost['fill_ms'] / cost['layer_ms']:.2f} layers. A token "
        f"takes {shape['kv_bytes_per_token'] / KIB:g} KiB of the cache at any depth.",
    ]
    verdicts = [_verdict_line(one, data) for one in data["verdicts"]]
    return [*lines, *verdicts, *map(_advice_line, data["advice"])]


def _rows(shape: Mapping[str, Any]) -> str:
    """Which rows of the head checks read."""
    if shape["exit_rows"] is None:
        return " (it reads the whole head)"
    rows, size = f"{shape['exit_rows']:,} of {shape['vocab_size']:,}", shape["check_bytes"] / 2**20
    return f" (it reads {rows} rows of the head, a copy of {size:,.0f} MiB)"


def _verdict_line(one: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    assumed = data["assumption"]
    if one["can_pay"]:
        return (
            f"Batch {one['batch_size']}: exits that skip layers can pay, up to "
            f"{one['best_plausible_speedup']:.2f} if {assumed['plausible_share']:.0%} of the "
            f"tokens exit at a quarter of the depth."
        )
    return (
        f"Batch {one['batch_size']}: exits that skip layers CANNOT pay. Even if "
        f"{assumed['plausible_share']:.0%} of the tokens exited at a quarter of the depth, wall "
        f"speedup would be "
        f"{one['best_plausible_speedup']:.2f}: {one['reason']}."
    )


def _advice_line(one: Mapping[str, Any]) -> str:
    """Which mode to serve at a batch size."""
    gain, batch = f"{one['wall_speedup']:.2f}", f"Batch {one['batch_size']}:"
    if one["mode"] == "verify":
        return (
            f"{batch} serve in mode verify (or defer), where the first {one['exit_layer']} layers "
            f"draft {one['drafts']} at a time if a request's text does not: wall speedup "
            f"{gain} if {one['acceptance']:.0%} of the layers' drafts are accepted. Measure that "
            f"first: exitserve eval."
        )
    if one["mode"] == "confidence":
        return f"{batch} serve in mode confidence: wall speedup {gain} with the layers below."
    return f"{batch} serve at full depth (mode off): nothing here gains."


def drafting_headers(data: Mapping[str, Any], most: int | None = None) -> list[str]:
    """Columns of the table of several tokens a step, for the first `most` batch sizes or all."""
    sizes = [cost["batch_size"] for cost in data["costs"]][:most]
    accepted = dict.fromkeys(one["acceptance"] for one in data["modes"])
    return ["layers", *(f"B={size}\n{one:.0%}" for size in sizes for one in accepted)]


def drafting_rows(data: Mapping[str, Any], most: int | None = None) -> list[list[str]]:
    """One row of text for each draft layer: the best wall speedup, and its drafts."""
    sizes = [cost["batch_size"] for cost in data["costs"]][:most]
    rows: dict[int, list[str]] = {}
    for one in data["modes"]:
        if one["mode"] == "verify" and one["batch_size"] in sizes:
            row = rows.setdefault(one["exit_layer"], [str(one["exit_layer"])])
            row.append(f"{one['wall_speedup']:.2f} ({one['drafts']})")
    return list(rows.values())


def recommendation(data: Mapping[str, Any]) -> str:
    """The exit layers to train, in a sentence or two."""
    best, share = data["best"], data["exit_share"]
    size = data["costs"][0]["batch_size"]
    assumed = (
        f"{gain_of(best, size, share):.2f} at batch {size} ({data['way']}) if {share:.0%} of the "
        f"tokens exit early, 40% of these by a quarter of the depth and 70% by half of it"
    )
    even = best["break_even_share"]
    needed = "They do not pay even if every token exits."
    if even is not None:
        needed = f"They pay if more than {even:.0%} of the tokens exit early."
    layers = _named(best["layers"])
    if not data["recommended"]:
        return (
            f"NO exit layers are recommended: wall speedup of the best, {layers}, would be "
            f"{assumed}. {needed}"
        )
    return f"Recommended exit layers: {layers}. Wall speedup {assumed}. {needed}"


def _named(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


DRAFTING_LEGEND = (
    "Several tokens a step (mode verify): a request's own text drafts where it repeats (a quarter "
    "of the steps), else the first layers do; full depth judges all drafts in one pass. Wall "
    "speedup at the best number of the layers' drafts, in parentheses, by batch size and share of "
    "them that is accepted. Mode defer is the same at a higher share."
)
LEGEND = (
    "One exit layer: wall speedup over full depth if all tokens exit there; if some do and only "
    "active rows run (CPU); and masked, if all rows run as long as one does (CUDA graphs). "
    "Break-even: share of tokens that must exit there, at the first batch size. Copies: a token "
    "that exits keeps its full space in the cache; so much of it is filled from the state at which "
    "it exited."
)


def markdown(data: dict[str, Any]) -> str:
    """The page `report.md`."""
    one_line = [header.replace("\n", " ") for header in layer_headers(data)]
    lines = [f"# What exits can give: {data['model']}", ""]
    for note in data["notes"]:
        lines += [f"> **Note.** {note}", ""]
    lines += [*(f"- {line}" for line in summary(data)), "", recommendation(data), ""]
    lines += [markdown_table(choice_headers(data), choice_rows(data)), ""]
    drafting = [header.replace("\n", ", ") for header in drafting_headers(data)]
    lines += ["## Several tokens a step", "", markdown_table(drafting, drafting_rows(data)), ""]
    lines += [DRAFTING_LEGEND, ""]
    lines += ["## Exit layers, one at a time", "", markdown_table(one_line, layer_rows(data)), ""]
    lines += [
        f"{LEGEND} A star marks the best layers under the assumption.",
        "",
        "![plan](plan.png)",
        "",
    ]
    lines += ["## What the parts of a step cost", "", _cost_table(data), ""]
    if data["measured"]:
        source = data["source"]
        lines += [
            f"Timed on matrices of the model's shapes, the least of {source['rounds']} rounds in "
            f"turn, {source['threads']} threads. The rest of a step, and planning exits "
            f"({data['costs'][0]['exits_ms']:g} ms), are constants of the engine.",
            "",
        ]
    lines += [f"{machine_line(data)}.", ""]
    return "\n".join(lines)


def _cost_table(data: Mapping[str, Any]) -> str:
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
    return markdown_table(headers, rows)


def plot(data: Mapping[str, Any]) -> Figure:
    """Wall speedup and break-even share against the exit layer, a line for each batch size."""
    # Figure, not pyplot: no global state, and no window is ever opened.
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    speeds, shares = figure.subplots(1, 2, sharex=True)
    figure.suptitle(f"{data['model']}: what one exit layer can give ({data['way']})", fontsize=11)
    for index in range(len(data["costs"])):
        _draw(speeds, shares, data, index)
    speeds.set_yscale("log")
    speeds.yaxis.set_major_formatter(ScalarFormatter())
    speeds.yaxis.set_minor_formatter(ScalarFormatter())
    speeds.axhline(1.0, color="silver", linewidth=1, zorder=0)
    speeds.set_ylabel("wall speedup over full depth")
    speeds.set_title("solid: every token exits; dashed: some do", fontsize=10)
    shares.set_ylabel("share of tokens that must exit")
    shares.set_ylim(0, 1)
    shares.set_title("break-even share (no line: never)", fontsize=10)
    for panel in (speeds, shares):
        panel.set_xlabel(f"exit layer, of {data['shape']['num_layers']}")
        panel.grid(alpha=0.25)
        for layer in data["best"]["layers"]:
            panel.axvline(layer, color="darkgrey", linewidth=1, linestyle=":", zorder=0)
    handles, labels = speeds.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(speeds: Axes, shares: Axes, data: Mapping[str, Any], index: int) -> None:
    size = data["costs"][index]["batch_size"]
    layers = [one["exit_layer"] for one in data["exit_layers"]]
    batches = [one["batches"][index] for one in data["exit_layers"]]
    look: dict[str, Any] = {
        "color": f"C{index}",
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
    ways = [batch[data["way"]] for batch in batches]
    speeds.plot(
        layers,
        [way["speedup_at_share"] for way in ways],
        **look,
        linestyle="--",
        label=f"batch {size}: {data['exit_share']:.0%} exit",
    )
    even = [way["break_even_share"] for way in ways]
    known = [float("nan") if share is None else share for share in even]
    shares.plot(layers, known, **look)
