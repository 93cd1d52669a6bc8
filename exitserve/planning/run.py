"""Makes the plan of a model, as report data; see docs/will-it-pay.md for the keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from exitserve.checkpoint.block import MultiExit
from exitserve.costs.byte_costs import DecoderShape
from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import (
    Drafting,
    assumed_acceptance,
    best_drafts,
    best_text_drafts,
    drafting_speedup,
)
from exitserve.costs.skipping import break_even_share, speedup
from exitserve.costs.sources import CostSource
from exitserve.planning.recommend import (
    PLAUSIBLE,
    SHARES,
    WORTH,
    bound_by_launches,
    choose_layers,
    shares_at,
    verdict,
)
from exitserve.reporting.report import machine, rounded, versions

ROWS_SHOWN = 8
"""About as many exit layers, evenly spread, are in tables, besides the best and those declared."""
PARTS = ("layer", "attention", "fill", "check", "head", "rest", "exits")
"""Of a step, whose times are told."""
_GAIN = itemgetter("wall_speedup")
DRAFT_DEPTHS = (1 / 8, 1 / 3)
"""Shares of the depth whose drafts are in tables, besides the best, where none are declared."""


def make_plan(
    source: CostSource,
    *,
    model: str,
    batch_sizes: Sequence[int],
    context: int,
    exit_share: float,
    block: MultiExit | None,
) -> dict[str, Any]:
    """The report without its `schema_version`.

    Args:
        source: the costs.
        model: its name.
        batch_sizes: to plan for, the most important first.
        context: tokens that each row's attention reads.
        exit_share: S, the share of tokens that is assumed to exit.
        block: what the checkpoint declares of its exits.
    """
    costs, shape = source.costs, source.shape
    own_layers = () if block is None else block.exit_layers
    # On a CPU the engine runs active rows only; in a GPU's graph all rows keep their places.
    compacts = bool(source.details.get("threads"))
    first = batch_sizes[0]
    layers = choose_layers(costs, first, exit_share, compacts=compacts)
    shares = sorted({*SHARES, exit_share})

    def choice(layers: Sequence[int]) -> dict[str, Any]:
        return _choice_block(costs, layers, batch_sizes, shares, compacts)

    def drafts(layers: Iterable[int], batch: int) -> list[dict[str, Any]]:
        return [_drafts(costs, layer, batch, block, compacts) for layer in layers]

    best = choice(layers)
    drafting = max(drafts(range(1, shape.num_layers), first), key=_GAIN)
    if not own_layers and _GAIN(drafting) >= gain_of(best, first, exit_share):
        layers = (drafting["exit_layer"],)
    served = choice(own_layers or layers)
    # A server drafts with the layers up to its first exit.
    advice = [
        _advice(drafts(served["layers"][:1], batch)[0], gain_of(served, batch, exit_share))
        for batch in batch_sizes
    ]
    some = (max(1, round(depth * shape.num_layers)) for depth in DRAFT_DEPTHS)
    shown = own_layers or {drafting["exit_layer"], *some}
    return {
        "model": model,
        "measured": source.measured,
        "source": source.details,
        "dtype": source.dtype,
        "context": context,
        "exit_share": exit_share,
        "way": "compacted" if compacts else "masked",
        "notes": list(source.notes),
        "shape": _shape_block(shape),
        "costs": [_costs_block(costs, batch, compacts) for batch in batch_sizes],
        "exit_layers": [
            _layer_block(costs, shape, layer, batch_sizes, exit_share, compacts)
            for layer in range(1, shape.num_layers)
        ],
        "best": best,
        "recommended": served["layers"] if any(a["mode"] != "off" for a in advice) else [],
        "declared": served if own_layers else None,
        "plausible_share": PLAUSIBLE,
        "verdicts": [
            {"batch_size": batch, "best_plausible_speedup": round(gain, 4), "reason": reason}
            for batch in batch_sizes
            for gain, reason in [verdict(costs, batch, compacts=compacts)]
        ],
        "modes": [one for batch in batch_sizes for one in drafts(sorted(shown), batch)],
        "advice": advice,
        "machine": machine(),
        "versions": versions(),
    }


def _drafts(
    costs: StepCosts, layer: int, batch: int, block: MultiExit | None, compacts: bool
) -> dict[str, Any]:
    """An entry of `modes`, by the calibration's acceptance or else the one that is assumed."""
    known = {} if block is None or block.calibration is None else block.calibration.agreement_at
    accepted = known.get(layer, assumed_acceptance(layer, costs.num_layers))
    found = best_drafting(costs, batch, layer, accepted, alike=not compacts)
    return found | {"counted": layer in known}


def best_drafting(
    costs: StepCosts,
    batch: int,
    layer: int,
    acceptance: float,
    *,
    checks: bool = False,
    alike: bool,
) -> dict[str, Any]:
    """An entry of the report's `modes`: the drafts of a layer that gain most, for B = `batch`; see
    `Drafting`.
    """
    way = Drafting(exit_layer=layer, drafts=0, checks=checks, alike=alike)
    way = replace(way, text=best_text_drafts(costs, batch, way))
    way = replace(way, drafts=best_drafts(costs, batch, way, acceptance))
    return {
        "mode": "defer" if checks else "verify",
        "batch_size": batch,
        "exit_layer": layer,
        "drafts": way.drafts,
        "acceptance": round(acceptance, 4),
        "wall_speedup": round(drafting_speedup(costs, batch, way, acceptance), 4),
    }


def _advice(drafts: dict[str, Any], skipping: float) -> dict[str, Any]:
    """Which mode to serve at a batch size: one that drafts, or exits that skip layers, which give
    `skipping`."""
    if max(skipping, drafts["wall_speedup"]) < WORTH:
        return drafts | {"mode": "off", "drafts": 0, "wall_speedup": 1.0}
    if skipping > drafts["wall_speedup"]:
        return drafts | {"mode": "confidence", "drafts": 0, "wall_speedup": skipping}
    return drafts


def gain_of(choice: Mapping[str, Any], batch: int, share: float) -> float:
    """Wall speedup of a choice of exit layers, from its block of the report."""
    return next(
        float(one["speedup"])
        for one in choice["speedups"]
        if (one["batch_size"], one["exit_share"]) == (batch, share)
    )


def shown_layers(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `exit_layers` that tables show."""
    full = data["shape"]["num_layers"]
    step = max(1, round(full / ROWS_SHOWN))
    shown = {*range(step, full, step), *data["best"]["layers"], *data["recommended"]}
    if data["declared"]:
        shown |= set(data["declared"]["layers"])
    return [one for one in data["exit_layers"] if one["exit_layer"] in shown]


def _shape_block(shape: DecoderShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "layer_bytes": shape.layer_bytes,
        "head_bytes": shape.head_bytes,
        "exit_rows": shape.exit_rows,
        "check_bytes": shape.check_bytes,
        "fill_bytes": shape.kv_projection_bytes,
        "kv_bytes_per_token": shape.num_layers * shape.kv_token_bytes,
    }


def _costs_block(costs: StepCosts, batch: int, compacts: bool) -> dict[str, Any]:
    seconds = {name: getattr(costs, name)(batch) for name in PARTS}
    seconds["full_depth"] = costs.full(batch)
    return {
        "batch_size": batch,
        **{f"{name}_ms": round(1e3 * found, 6) for name, found in seconds.items()},
        "check_in_layers": round(costs.check_in_layers(batch), 4),
        "bound_by_launches": not compacts and bound_by_launches(costs, batch),
    }


def _layer_block(
    costs: StepCosts,
    shape: DecoderShape,
    layer: int,
    batch_sizes: Sequence[int],
    share: float,
    compacts: bool,
) -> dict[str, Any]:
    """One exit layer, as the only one."""

    def gain(batch: int, left: float) -> float:
        return round(speedup(costs, batch, {layer: left}, compacts=compacts), 4)

    return {
        "exit_layer": layer,
        "kv_copy_bytes_per_token": (shape.num_layers - layer) * shape.kv_token_bytes,
        "batches": [
            {
                "batch_size": batch,
                "best_speedup": gain(batch, 1.0),
                "break_even_share": rounded(
                    break_even_share(costs, batch, layer, compacts=compacts)
                ),
                "speedup_at_share": gain(batch, share),
            }
            for batch in batch_sizes
        ],
    }


def _choice_block(
    costs: StepCosts,
    layers: Sequence[int],
    batch_sizes: Sequence[int],
    shares: Sequence[float],
    compacts: bool,
) -> dict[str, Any]:
    """Several exit layers together, and what they gain if given shares of the tokens exit."""

    def gain(batch: int, share: float) -> float:
        exits = shares_at(layers, costs.num_layers, share)
        return round(speedup(costs, batch, exits, compacts=compacts), 4)

    return {
        "layers": list(layers),
        "speedups": [
            {"batch_size": batch, "exit_share": share, "speedup": gain(batch, share)}
            for batch in batch_sizes
            for share in shares
        ],
    }
