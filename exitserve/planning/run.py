"""Makes the plan of a model, as report data; see docs/will-it-pay.md for the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exitserve.costs.byte_costs import DecoderShape
from exitserve.costs.curves import StepCosts
from exitserve.costs.drafting import ASSUMED, ASSUMED_DEPTH
from exitserve.costs.skipping import break_even_share, speedup
from exitserve.costs.sources import CostSource
from exitserve.planning.drafts import draft_layers, drafting_table
from exitserve.planning.recommend import (
    LEFT_BY,
    PLAUSIBLE,
    SHALLOWEST,
    SHARES,
    WORTH,
    break_even_total,
    choose_layers,
    shares_at,
    verdict,
)
from exitserve.reporting.report import machine, rounded, versions

ROWS_SHOWN = 8
"""About as many exit layers, evenly spread, are in tables, besides the best and those declared."""
WAYS = {"compacted": True, "masked": False}


def make_plan(
    source: CostSource,
    *,
    model: str,
    batch_sizes: Sequence[int],
    context: int,
    exit_share: float,
    own_layers: Sequence[int],
) -> dict[str, Any]:
    """The report without its `schema_version`.

    Args:
        source: the costs.
        model: its name.
        batch_sizes: to plan for, the most important first.
        context: tokens that each row's attention reads.
        exit_share: S, the share of tokens that is assumed to exit.
        own_layers: exit layers that the checkpoint declares already.
    """
    costs, shape = source.costs, source.shape
    # On a CPU the engine runs active rows only; in a GPU's graph all rows keep their places.
    way = "compacted" if source.details.get("threads") else "masked"
    first = batch_sizes[0]
    layers = choose_layers(costs, first, exit_share, compacts=WAYS[way])
    shares = sorted({*SHARES, exit_share})

    def choice(layers: Sequence[int]) -> dict[str, Any]:
        return _choice_block(costs, layers, batch_sizes, shares, way)

    best = choice(layers)
    drafted = draft_layers(shape.num_layers, own_layers)
    modes = drafting_table(costs, batch_sizes, drafted, alike=way == "masked")
    return {
        "model": model,
        "measured": source.measured,
        "source": source.details,
        "dtype": source.dtype,
        "context": context,
        "exit_share": exit_share,
        "way": way,
        "notes": list(source.notes),
        "shape": _shape_block(shape),
        "costs": [_costs_block(costs, batch) for batch in batch_sizes],
        "exit_layers": [
            _layer_block(costs, shape, layer, batch_sizes, exit_share)
            for layer in range(1, shape.num_layers)
        ],
        "best": best,
        "recommended": list(layers) if gain_of(best, first, exit_share) >= WORTH else [],
        "declared": choice(own_layers) if own_layers else None,
        "assumption": {
            "left_by": [list(point) for point in LEFT_BY],
            "plausible_share": PLAUSIBLE,
            "at_depth": SHALLOWEST,
            "worth": WORTH,
        },
        "verdicts": [_verdict_block(costs, batch, way) for batch in batch_sizes],
        "modes": modes,
        "advice": [
            _advice(best, modes, batch, exit_share, shape.num_layers) for batch in batch_sizes
        ],
        "machine": machine(),
        "versions": versions(),
    }


def _advice(
    best: Mapping[str, Any],
    modes: Sequence[Mapping[str, Any]],
    batch: int,
    share: float,
    num_layers: int,
) -> dict[str, Any]:
    """Which mode to serve at a batch size: an entry of `modes`, or exits that skip layers.

    Drafts are those at the assumed depth and acceptance.
    """
    layers = {one["exit_layer"] for one in modes}
    layer = min(layers, key=lambda one: abs(one - ASSUMED_DEPTH * num_layers))
    wanted = {"mode": "verify", "batch_size": batch, "exit_layer": layer}
    wanted |= {"acceptance": ASSUMED}
    found = dict(next(one for one in modes if wanted.items() <= one.items()))
    skipping = gain_of(best, batch, share)
    if max(skipping, found["wall_speedup"]) < WORTH:
        found |= {"mode": "off", "drafts": 0, "wall_speedup": 1.0}
    elif skipping > found["wall_speedup"]:
        found |= {"mode": "confidence", "drafts": 0, "wall_speedup": skipping}
    return found


def gain_of(choice: Mapping[str, Any], batch: int, share: float) -> float:
    """Wall speedup of a choice of exit layers, from its block of the report."""
    return next(
        float(one["speedup"])
        for one in choice["speedups"]
        if (one["batch_size"], one["exit_share"]) == (batch, share)
    )


def shown_layers(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of `exit_layers` that tables show."""
    full = data["shape"]["num_layers"]
    step = max(1, round(full / ROWS_SHOWN))
    shown = {*range(step, full, step), *data["best"]["layers"]}
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


def _costs_block(costs: StepCosts, batch: int) -> dict[str, Any]:
    def milliseconds(seconds: float) -> float:
        return round(1e3 * seconds, 6)

    return {
        "batch_size": batch,
        "layer_ms": milliseconds(costs.layer(batch)),
        "attention_ms": milliseconds(costs.attention(batch)),
        "fill_ms": milliseconds(costs.fill(batch)),
        "check_ms": milliseconds(costs.check(batch)),
        "head_ms": milliseconds(costs.head(batch)),
        "rest_ms": milliseconds(costs.rest(batch)),
        "exits_ms": milliseconds(costs.exits(batch)),
        "full_depth_ms": milliseconds(costs.full(batch)),
        "check_in_layers": round(costs.check_in_layers(batch), 4),
    }


def _layer_block(
    costs: StepCosts, shape: DecoderShape, layer: int, batch_sizes: Sequence[int], share: float
) -> dict[str, Any]:
    """One exit layer, as the only one."""
    skipped = shape.num_layers - layer
    return {
        "exit_layer": layer,
        "kv_copy_bytes_per_token": skipped * shape.kv_token_bytes,
        "kv_copy_share": round(skipped / shape.num_layers, 4),
        "batches": [
            {
                "batch_size": batch,
                "best_speedup": round(speedup(costs, batch, {layer: 1.0}, compacts=True), 4),
                **{
                    way: {
                        "break_even_share": rounded(
                            break_even_share(costs, batch, layer, compacts=compacts)
                        ),
                        "speedup_at_share": round(
                            speedup(costs, batch, {layer: share}, compacts=compacts), 4
                        ),
                    }
                    for way, compacts in WAYS.items()
                },
            }
            for batch in batch_sizes
        ],
    }


def _choice_block(
    costs: StepCosts,
    layers: Sequence[int],
    batch_sizes: Sequence[int],
    shares: Sequence[float],
    way: str,
) -> dict[str, Any]:
    """Several exit layers together, and what they gain if given shares of the tokens exit."""
    return {
        "layers": list(layers),
        "break_even_share": rounded(
            break_even_total(costs, batch_sizes[0], layers, compacts=WAYS[way])
        ),
        "speedups": [
            {
                "batch_size": batch,
                "exit_share": share,
                "speedup": round(
                    speedup(
                        costs,
                        batch,
                        shares_at(layers, costs.num_layers, share),
                        compacts=WAYS[way],
                    ),
                    4,
                ),
            }
            for batch in batch_sizes
            for share in shares
        ],
    }


def _verdict_block(costs: StepCosts, batch: int, way: str) -> dict[str, Any]:
    gain, reason = verdict(costs, batch, compacts=WAYS[way])
    return {
        "batch_size": batch,
        "best_plausible_speedup": round(gain, 4),
        "can_pay": reason is None,
        "reason": reason,
    }
