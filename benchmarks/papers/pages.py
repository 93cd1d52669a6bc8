"""Fills the tables and draws the plots of docs/papers from docs/papers/results.

    python benchmarks/papers/pages.py

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what lies between is made here, from the
JSON that the studies left, and from nothing else.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from tables import (
    RESULTS,
    Column,
    Measured,
    against,
    along_table,
    along_training,
    at,
    at_depth,
    by_depth_table,
    curves,
    exits_table,
    numbers_table,
    runs_of,
    seeds,
    spread,
    values,
    variants,
)

from exitserve.reporting.report import PLOT_DPI, markdown_table

PAGES = RESULTS.parent
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

DEEPEST = 5
"""Layers of the small decoder (decoders.py)."""
RANK: list[Column] = [
    ("effective rank, last layer", at_depth("states", "effective_rank", DEEPEST), ".1f")
]
OF_GPT2: list[Column] = [
    ("mean cosine, last layer", at_depth("states", "mean_cosine", 4), ".2f"),
]
GRID = ("simreg-grid", "plain")
OF_DIGITS: list[Column] = [
    ("accuracy, depth 1", at_depth("layers", "accuracy", 1), ".2f"),
    ("at 5", at_depth("layers", "accuracy", 5), ".2f"),
    ("at 9", at_depth("layers", "accuracy", 9), ".2f"),
    ("COS, depth 5", at_depth("layers", "cos", 5), ".2f"),
    ("CKA, depth 5", at_depth("layers", "cka", 5), ".2f"),
]
OF_EXITS: list[Column] = [
    ("agreement, depth 1", at_depth("layers", "agreement", 1), ".3f"),
    ("depth 3", at_depth("layers", "agreement", 3), ".3f"),
    ("speedup at 0.95", at("speedup", "0.95"), ".2f"),
    ("at 0.98", at("speedup", "0.98"), ".2f"),
    ("tokens a step", at("tokens_a_step", "1"), ".2f"),
]


def _last(run: Measured, step: str) -> dict[str, float]:
    states: dict[str, dict[str, float]] = run["along"][step]["states"]
    return states[max(states, key=int)]


def _along_cosine(run: Measured) -> dict[str, float]:
    return {step: _last(run, step)["mean_cosine"] for step in run["along"]}


def _vocabularies() -> str:
    runs = runs_of("cost-vocabulary")
    lines = []
    for name in variants(runs):
        times = values(runs, name, at("time"))
        plain, headless = (values(runs, name, at(f"{one}_gib"))[0] for one in ("ce", "headless"))
        lines.append(
            [
                f"{int(name):,}",
                spread(values(runs, name, at("plain_seconds")), ".2f"),
                spread(values(runs, name, at("headless_seconds")), ".2f"),
                f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})",
                f"{plain:.2f}",
                f"{headless:.2f}",
            ]
        )
    headers = ["vocabulary", "plain, s a step", "headless, s a step", "ratio (range)"]
    return markdown_table([*headers, "plain, GiB", "headless, GiB"], lines)


def _heads_taught() -> str:
    """Plain and headless training with ever more sequences a step; differences seed by seed."""
    runs = runs_of("headless-batches")
    shares = ("2%", "15%")
    lines = []
    for name in variants(runs):
        kind, _, sequences = name.partition(", ")
        if kind != "plain":
            continue
        headless = f"headless, {sequences}"
        plain = values(runs, name, at("layers", "3", "loss"))
        cells = [spread(plain)]
        for share in shares:
            taught = values(runs, headless, at(share, "loss"))
            behind = [one - other for one, other in zip(taught, plain, strict=True)]
            cells += [spread(taught), spread(behind, "+.3f")]
        lines.append([sequences, *cells])
    headers = ["a step", "plain"]
    for share in shares:
        headers += [f"head for {share}", "less plain"]
    return markdown_table(headers, lines)


def _gone_on() -> str:
    """Losses after plain training, and their differences from more of it, seed by seed."""
    runs = runs_of("dispersion-middle")
    lines = []
    for name in variants(runs)[1:]:
        own = seeds(runs, name)
        less = [run["loss"] - runs[f"plain/{seed}"]["loss"] for seed, run in own.items()]
        losses, cosines = values(runs, name, at("loss")), values(runs, name, OF_GPT2[0][1])
        lines.append([name, spread(losses), spread(less, "+.3f"), spread(cosines, ".2f")])
    headers = ["", "held-out loss", "less plain", "mean cosine, last layer"]
    return markdown_table(headers, lines)


def _by_depth(study: str, key: str) -> str:
    """A measure of a study of aligned training, at some of its six depths."""
    return by_depth_table(study, "layers", key, (1, 2, 4, 6), ".3f")


TABLES: dict[str, Callable[[], str]] = {
    "aligned-texts-loss": lambda: _by_depth("aligned-texts", "loss"),
    "aligned-images-accuracy": lambda: _by_depth("aligned-images", "accuracy"),
    "aligned-sentences-exits": lambda: exits_table("aligned-sentences", ("0.8",)),
    "aligned-digits": lambda: numbers_table("aligned-digits", OF_DIGITS),
    "simreg-grid": lambda: against("simreg-grid", GRID, []),
    "simreg-places": lambda: against("simreg-places", GRID, []),
    "simreg-baselines": lambda: against("simreg-baselines", ("simreg-baselines", "plain"), OF_GPT2),
    "nitp-targets": lambda: against("nitp-targets", ("nitp-targets", "plain"), RANK),
    "dispersion-losses": lambda: against(
        "dispersion-losses", ("dispersion-losses", "plain"), OF_GPT2
    ),
    "dispersion-middle": _gone_on,
    "headless-decoders": lambda: numbers_table(
        "headless-decoders",
        [
            ("held-out loss", at("loss"), ".3f"),
            ("embeddings as head", at("embeddings_as_head"), ".3f"),
        ],
    ),
    "headless-batches": _heads_taught,
    "headless-encoders": lambda: numbers_table(
        "headless-encoders", [("accuracy on SST-2, %", at("accuracy", scale=100), ".1f")]
    ),
    "cost-vocabulary": _vocabularies,
    "combined-steps": lambda: along_table("combined", DEEPEST, OF_EXITS, "steps"),
    "combined-loss": lambda: along_table("combined", DEEPEST, OF_EXITS, "loss"),
}

LOSS = "held-out loss (nats)"


def _loss_curve(run: Measured) -> dict[str, Any]:
    curve: dict[str, Any] = run["curve"]
    return curve


PLOTS: dict[str, Callable[[], Figure]] = {
    "aligned-texts-loss": lambda: curves("aligned-texts", "layers", "loss", LOSS),
    "aligned-texts-cos": lambda: curves(
        "aligned-texts", "inspected", "cos", "cosine with the last layer"
    ),
    "aligned-sentences-accuracy": lambda: curves(
        "aligned-sentences", "layers", "accuracy", "accuracy on SST-2"
    ),
    "aligned-images-accuracy": lambda: curves(
        "aligned-images", "layers", "accuracy", "accuracy on CIFAR-10"
    ),
    "simreg-loss": lambda: along_training(
        "simreg-grid", _loss_curve, LOSS, ("plain", "τ 0.01, λ 0.3", "τ 0.03, λ 0.3", "τ 0.01, λ 3")
    ),
    "nitp-loss": lambda: along_training(
        "nitp-targets",
        _loss_curve,
        LOSS,
        ("plain", "shallow target (layer 1)", "same position (t to t)", "mean squared error"),
    ),
    "dispersion-family": lambda: along_training(
        "dispersion-family", _along_cosine, "mean cosine, last layer"
    ),
    "dispersion-losses": lambda: curves(
        "dispersion-losses", "states", "mean_cosine", "mean cosine of two tokens"
    ),
}


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


def main() -> None:
    """Writes the pages and the plots that they show."""
    for page in sorted(PAGES.glob("*.md")):
        text = filled(page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
        for name in re.findall(r"\]\(([\w-]+)\.png\)", text):
            PLOTS[name]().savefig(PAGES / f"{name}.png", dpi=PLOT_DPI)


if __name__ == "__main__":
    main()
