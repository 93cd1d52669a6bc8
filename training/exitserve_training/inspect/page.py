"""The pages: a table for the terminal, and Markdown with the pictures."""

import itertools
from collections.abc import Mapping
from typing import Any

from exitserve.reporting.report import cell, columns, machine_line, markdown_page, markdown_table

PICTURES = {
    "accuracy": "Accuracy through the shared head, and of a linear probe fitted at each depth.",
    "loss": "Cross-entropy through the shared head.",
    "similarity": "Similarity of all pairs of layers (aligned training, section 2).",
    "cosine_with_last": "Cosine of each sample's state with its last one (its appendix A).",
    "condensation": "Cosines of all pairs of tokens of a sequence (dispersion loss, figure 2).",
    "effective_rank": "How many directions the states of a sequence use (NITP).",
}


def table(report: Mapping[str, Any], most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """The first headers, and a row for each depth; exit layers are marked with a star."""
    last = report["num_layers"] - 1
    found = []
    for number, (depth, layer) in enumerate(report["layers"].items()):
        mark = "*" if int(depth) in report["exit_layers"] else ""
        row = {
            "depth": f"{depth}{mark}",
            "loss": f"{layer['loss']:.3f}",
            "ppl": cell(layer["perplexity"], ".1f"),
            "accuracy": f"{layer['accuracy']:.1%}",
            "probe": cell(layer["probe_accuracy"], ".1%"),
            "NC1": cell(layer["nc1"], ".2f"),
            "COS": f"{report['cos'][number][last]:.2f}",
            "CKA": f"{report['cka'][number][last]:.2f}",
            "mean cos": f"{report['condensation']['mean_cosine'][depth]:.2f}",
            "rank": f"{layer['effective_rank']:.1f}",
            "margin": f"{layer['margin']:.2f}",
            "SimReg": cell(layer["contrastive_similarity"], ".2g"),
        }
        found.append(dict(itertools.islice(row.items(), most)))
    return columns(found)


def summary(report: Mapping[str, Any]) -> str:
    """What a reader wants first, in two sentences."""
    spread = report["condensation"]
    depths = ", ".join(
        f"{float(share):.0%} at depth {depth}" for share, depth in report["minimal_depth"].items()
    )
    return (
        f"Of the last layer's accuracy the shared head reaches {depths} (of "
        f"{report['num_layers']}). Mean cosine of tokens against depth: Spearman "
        f"{spread['spearman']:.2f}, Kendall {spread['kendall']:.2f}."
    )


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    unit = {"class": "rows", "hidden token": "hidden tokens"}.get(report["task"], "tokens")
    return markdown_page(
        f"# Inspection: {report['model']}",
        f"{report['architecture']}, {report['num_layers']} layers (exit layers with a star). "
        f"{report['said']:,} {unit} of {report['rows']:,} inputs; what compares layers is "
        f"measured on {report['samples']:,} of them. {summary(report)}",
        markdown_table(*table(report)),
        "COS and CKA are with the last layer, of states centred over the samples. Mean cos is that "
        "of all pairs of tokens of a sequence, rank their effective rank. Probe and NC1 take the "
        "classes, or the most frequent tokens, as classes; NC1 is within-class over between-class "
        "variability, 0 when collapsed. Margin is the label's logit less the greatest other's, and "
        "SimReg that paper's loss.",
        *(f"![{name}]({name}.png)\n\n{text}" for name, text in PICTURES.items()),
        *(_texts(report["texts"], report["num_layers"]) if report["texts"] else ()),
        machine_line(report),
    )


def _texts(texts: Mapping[str, Any], num_layers: int) -> list[str]:
    coherences = texts["coherence"] or {}
    table = [
        [f"{depth} of {num_layers}", f"{value:.3f}", cell(coherences.get(depth), ".3f")]
        for depth, value in texts["diversity"].items()
    ]
    samples = [f"--- depth {depth}\n{sample}" for depth, sample in texts["samples"].items()]
    return [
        "## What it writes, cut at each exit layer",
        f"{texts['prompts']} prompts, {texts['new_tokens']} tokens each, nucleus sampling with "
        f"p = {texts['top_p']}. Diversity and coherence as in the aligned-training paper "
        f"(equations 5 and 6).",
        markdown_table(("depth", "diversity", "coherence"), table),
        "The first prompt and its continuations:",
        "\n".join(["````text", texts["prompt"], *samples, "````"]),
    ]
