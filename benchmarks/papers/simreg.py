"""SimReg's claims, on small decoders trained here.

    python benchmarks/papers/simreg.py grid --data NOVELS/*.txt
    python benchmarks/papers/simreg.py places --data NOVELS/*.txt
    python benchmarks/papers/simreg.py baselines --data NOVELS/*.txt

`grid`: the loss against steps without SimReg and with it, over temperatures and weights (its
figure 4, table 6). `places`: the layer it acts on (figure 5), chunks (table 2), and whether plain
training at another learning rate gains as much. `baselines`: the contrastive losses that it is
compared with (table 1). Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measures
from decoders import decoder
from study import Run, Study, seeds_of, study_command

TEMPERATURES = (0.01, 0.03, 0.1)
WEIGHTS = (0.1, 0.3, 3.0)
"""The paper's rule gives 10 * sqrt(96 / 1024) = 3.06 for this size."""
PLACED = {"weight": 0.3}
"""Where places, chunks and baselines are compared: the best of the grid."""
BASELINES = {
    "SimReg": "simreg",
    "SimCSE": "simcse",
    "CPretrain": "cpretrain",
    "CReg": "creg",
    "SCE": "sce",
}
SMALLER = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def grid(novels: list[str]) -> Study:
    """Temperatures and weights."""
    variants: dict[str, list[Any]] = {"plain": ["ce"]}
    for temperature in TEMPERATURES:
        for weight in WEIGHTS:
            variants[f"τ {temperature:g}, λ {weight:g}"] = _with(
                temperature=temperature, weight=weight
            )
    return _study("simreg-grid", novels, variants)


def places(novels: list[str]) -> Study:
    """Where it acts, and on how many tokens at once."""
    variants: dict[str, list[Any]] = {"last layer": _with(**PLACED)}
    for layer in (1, 3):
        variants[f"layer {layer}"] = _with(layers=[layer], **PLACED)
    variants["last layer, chunks of 64"] = _with(chunk_size=64, **PLACED)
    rates = {"plain, half the learning rate": 1.0e-3, "plain, twice the learning rate": 4.0e-3}
    variants |= {name: ["ce"] for name in rates}
    return _study("simreg-places", novels, variants, rates)


def baselines(novels: list[str]) -> Study:
    """Other contrastive losses at the same weight, on a smaller model for half the steps."""
    variants: dict[str, list[Any]] = {"plain": ["ce"]}
    variants |= {shown: ["ce", {"name": name, **PLACED}] for shown, name in BASELINES.items()}
    study = _study("simreg-baselines", novels, variants)
    for run in study.runs:
        run.recipe["config"] |= SMALLER
        run.recipe["training"] |= {"max_steps": 200, "warmup_steps": 20}
    return study


def _with(**options: Any) -> list[Any]:
    return ["ce", {"name": "simreg", **options}]


def _study(
    name: str,
    novels: list[str],
    variants: dict[str, list[Any]],
    rates: Mapping[str, float] | None = None,
) -> Study:
    def measure(folder: Path) -> dict[str, Any]:
        return {**measures.curve(folder), **measures.spread_of_states(folder, novels[-1:])}

    runs = []
    for seed, variant, objectives in seeds_of(variants):
        recipe = decoder(novels, objectives)
        if rates and variant in rates:
            recipe["training"]["learning_rate"] = rates[variant]
        runs.append(Run(variant, seed, recipe, measure))
    return Study(name, runs)


if __name__ == "__main__":
    study_command(__doc__, {"grid": grid, "places": places, "baselines": baselines})
