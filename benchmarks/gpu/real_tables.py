"""What the commands of `--call real` found, in a table and a line or two each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages import StageOutcome

from exitserve.reporting.report import markdown_table
from exitserve.settings import label_of

Report = Mapping[str, Any]
"""A command's report.json."""


def training_page(
    report: Report, earlier: Report, progress: str, whose: str = "the base's"
) -> StageOutcome:
    """Loss at each depth, before and after.

    Args:
        report: of the run.
        earlier: the data of the stage `train` of the call that it continues; empty without one.
        progress: the last line about it, which has the share of the card's products.
        whose: the loss is that full depth's is compared with.
    """
    before, after = report["initial_layers"], report["layers"]
    rows = [
        [depth, f"{before[depth]['loss']:.3f}", f"{own['loss']:.3f}", f"{own['accuracy']:.3f}"]
        for depth, own in after.items()
    ]
    last = str(report["num_layers"])
    base_loss = earlier.get("base_loss", before[last]["loss"])
    tokens = earlier.get("tokens_in_all", 0) + report["tokens_seen"]
    speed = report["tokens_seen"] / max(report["seconds"], 1e-9)
    told = (
        f"{report['steps']:,} steps, {report['tokens_seen'] / 1e6:.2f} M tokens in "
        f"{report['seconds']:.0f} s ({speed:,.0f} tokens/s), {tokens / 1e6:.2f} M in all"
    )
    exits = ", ".join(f"{depth}: {own['loss']:.2f}" for depth, own in after.items())
    change = after[last]["loss"] / base_loss - 1
    found = f"held-out loss {exits}; of full depth {change:+.1%} from {whose} {base_loss:.3f}"
    headers = ["depth", "loss before", "loss", "accuracy"]
    data = {"report": report, "base_loss": base_loss, "tokens_in_all": tokens, "progress": progress}
    page = f"{told}\n\n{markdown_table(headers, rows)}\n\n{progress}"
    return StageOutcome(data, page, verdict=[told, found])


def calibration_page(report: Report) -> StageOutcome:
    """What could be promised."""
    rows = []
    for one in report["promised"]:
        found = one["found"]
        cells = ["-"] * 3
        if found is not None:
            cells = [f"{found[key]:.3f}" for key in ("agreement", "mean_depth", "cost")]
        rows.append([one["target"], *cells])
    record = report["calibration"]
    told = f"{record['target']}: {'kept' if any(r[1] != '-' for r in rows) else 'no exit pays'}"
    at = ", ".join(f"{layer}: {share:.2f}" for layer, share in record["agreement_at"].items())
    page = markdown_table(["target", "agreement", "mean depth", "cost"], rows)
    page += f"\n\nAgreement with full depth on its own greedy text, by exit: {at}."
    return StageOutcome({"report": report}, page, verdict=[told])


def eval_page(report: Report) -> StageOutcome:
    """Agreement at each exit, and what the settings keep."""
    drafting = {one["exit_layer"]: one["agreement"] for one in report["drafting"]}
    at = ", ".join(f"{layer}: {share:.3f}" for layer, share in drafting.items())
    rows = [
        [
            case["mode"]
            if case["exit_threshold"] is None
            else f"{case['mode']} {case['exit_threshold']:g}",
            f"{case['mean_depth']:.2f}",
            f"{case['agreement']:.3f}",
            f"{case['perplexity']:.3f}",
        ]
        for case in report["cases"]
    ]
    told = f"agreement with full depth on its own greedy answers, by exit: {at}"
    page = markdown_table(["setting", "mean depth", "agreement", "perplexity"], rows)
    return StageOutcome({"report": report}, f"{told}\n\n{page}", verdict=[told])


def bench_page(report: Report) -> StageOutcome:
    """Speed beside plain vLLM's, by batch."""
    rows, told = [], dict[int, list[str]]()
    for case in report["cases"]:
        wall, label = case["wall_speedup"], label_of(case)
        rows.append(
            [
                str(case["batch_size"]),
                label,
                f"{case['tokens_per_second']:.0f}",
                f"{wall['median']:.2f} ({wall['min']:.2f}-{wall['max']:.2f})",
                f"{case['depth_speedup']:.2f}",
                f"{case['agreement']:.3f}",
            ]
        )
        if case["mode"] != "plain":
            own = told.setdefault(case["batch_size"], [])
            own.append(f"{label} {wall['median']:.2f}")
    headers = ["batch", "setting", "tokens/s", "wall speedup", "depth speedup", "agreement"]
    verdict = [f"batch {batch}: {', '.join(own)}" for batch, own in told.items()]
    return StageOutcome({"report": report}, markdown_table(headers, rows), verdict=verdict)
