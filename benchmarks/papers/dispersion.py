"""The dispersion paper's claims, on small GPT-2s trained here.

    python benchmarks/papers/dispersion.py family --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py losses --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py middle --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py settings --data NOVELS/*.txt

`family`: condensation in three sizes, from initialisation along training (its figures 2 and 4).
`losses`: with and without the dispersion loss and its three alternatives (tables 2, 4, figure 6).
`middle`: the same after plain training, as the paper's mid-training (table 2).
`settings`: weights and temperatures of the dispersion loss, from scratch (table 3).
Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measures
from decoders import Recipe, decoder
from study import Run, Study, seeds_of, study_command, train_quietly

SIZES = {"4 layers, D = 64": (4, 64), "6 layers, D = 128": (6, 128), "8 layers, D = 192": (8, 192)}
STEPS = 200
MORE_STEPS = 300
SAVED = 50
"""A checkpoint each so many steps is measured."""

LOSSES: dict[str, list[Any]] = {
    "plain": ["ce"],
    "dispersion": ["ce", "dispersion"],
    "dispersion, λ 1": ["ce", {"name": "dispersion", "weight": 1.0}],
    "decorrelation": ["ce", "decorrelation"],
    "decorrelation, features": ["ce", {"name": "decorrelation", "between": "features"}],
    "l2-repel": ["ce", "l2_repel"],
    "l2-repel, no self-pairs": ["ce", {"name": "l2_repel", "self_pairs": False}],
    "orthogonalization": ["ce", "orthogonalization"],
}
"""Weights are the paper's 0.1 where nothing is said."""
SETTINGS: dict[str, list[Any]] = {
    **{f"λ {one:g}": ["ce", {"name": "dispersion", "weight": one}] for one in (0.01, 0.5)},
    **{f"τ {one:g}": ["ce", {"name": "dispersion", "temperature": one}] for one in (0.1, 0.5, 2)},
}
"""What table 3 has beside λ 0.1 and 1 at τ 1, which are among `LOSSES`."""


def family(novels: list[str]) -> Study:
    """Sizes, and what training does to each."""
    return Study(
        "dispersion-family",
        [
            _along(name, seed, _gpt2(novels, ["ce"], *size), novels[-1:])
            for seed, name, size in seeds_of(SIZES)
        ],
    )


def losses(novels: list[str]) -> Study:
    """What the losses do to the smallest size."""
    return _compared("dispersion-losses", novels, LOSSES, _smallest)


def settings(novels: list[str]) -> Study:
    """What other weights and temperatures do to the same."""
    return _compared("dispersion-settings", novels, SETTINGS, _smallest)


def middle(novels: list[str]) -> Study:
    """The same losses from plain weights on: what table 2 has, of a model trained here."""
    begin = _smallest(novels, ["ce"])
    return _compared("dispersion-middle", novels, LOSSES, _gone_on, begin)


def _compared(
    name: str,
    novels: list[str],
    variants: dict[str, list[Any]],
    recipe: Callable[[list[str], list[Any]], Recipe],
    begin: Recipe | None = None,
) -> Study:
    def measure(folder: Path) -> dict[str, Any]:
        return {**measures.curve(folder), **measures.spread_of_states(folder, novels[-1:])}

    return Study(
        name,
        [
            Run(variant, seed, recipe(novels, objectives), measure, begin)
            for seed, variant, objectives in seeds_of(variants)
        ],
    )


def _smallest(novels: list[str], objectives: list[Any]) -> Recipe:
    return _gpt2(novels, objectives, *SIZES["4 layers, D = 64"])


def _gone_on(novels: list[str], objectives: list[Any]) -> Recipe:
    """300 steps more, at a quarter of the rate."""
    recipe = _smallest(novels, objectives)
    training = {**recipe["training"], "max_steps": MORE_STEPS, "warmup_steps": 15}
    training["learning_rate"] = training["learning_rate"] / 4
    return {**recipe, "training": training}


def _gpt2(novels: list[str], objectives: list[Any], layers: int, hidden: int) -> Recipe:
    recipe = decoder(novels, objectives)
    recipe["config"] = {
        "architecture": "gpt2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 32,
        "max_position_embeddings": 256,
    }
    recipe["training"] = {**recipe["training"], "max_steps": STEPS, "warmup_steps": 20}
    return recipe


def _along(name: str, seed: int, recipe: Recipe, texts: list[str]) -> Run:
    """A run whose states are measured as it begins, at each checkpoint, and at its end."""
    saving = {"save_strategy": "steps", "save_steps": SAVED, "save_total_limit": STEPS // SAVED}
    saved: Recipe = {**recipe, "training": {**recipe["training"], **saving}}

    def measure(folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as other:
            # A step at a rate of 0 leaves the weights that the run began with.
            still = {"learning_rate": 0.0, "max_steps": 1, "eval_strategy": "no"}
            begun = train_quietly(recipe, Path(other) / "begun", seed, **still)
            along = {"0": measures.spread_of_states(begun, texts)}
        for step in range(SAVED, STEPS + 1, SAVED):
            along[str(step)] = measures.spread_of_states(folder / f"checkpoint-{step}", texts)
        return {**measures.curve(folder), "along": along}

    return Run(name, seed, saved, measure)


if __name__ == "__main__":
    studies = (family, losses, middle, settings)
    study_command(__doc__, {study.__name__: study for study in studies})
