"""The dispersion paper's claims, on small GPT-2s trained here.

    python benchmarks/papers/dispersion.py family --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py losses --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py distillation --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py settings --data NOVELS/*.txt
    python benchmarks/papers/dispersion.py middle --data NOVELS/*.txt WIKITEXT-2

`family`: condensation in three sizes, from initialisation along training (its figures 2 and 4).
`losses`: with and without the dispersion loss and its three alternatives (tables 2, 4, figure 6).
`distillation`: a small model that learns from a larger, dispersed one (figure 3).
`settings`: weights and temperatures of the dispersion loss, from scratch (table 3).
`middle`: losses, weights and temperatures after plain training on novels, when training goes on
with WikiText-2 (tables 2 and 3; valid.txt is trained on and test.txt held out, both of the folder
that is given last).
Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measures
from decoders import Recipe, decoder
from study import SEEDS, Run, Study, seeds_of, study_command, train_quietly

SIZES = {"4 layers, D = 64": (4, 64), "6 layers, D = 128": (6, 128), "8 layers, D = 192": (8, 192)}
STEPS = 200
PRETRAINING_STEPS = 1500
MIDDLE_STEPS = 300
DISTILLED_STEPS = 400
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
    recipes = {name: _smallest(novels, these) for name, these in LOSSES.items()}
    return _compared("dispersion-losses", recipes, novels[-1:])


def settings(novels: list[str]) -> Study:
    """What other weights and temperatures do to the same."""
    recipes = {name: _smallest(novels, these) for name, these in SETTINGS.items()}
    return _compared("dispersion-settings", recipes, novels[-1:])


def middle(data: list[str]) -> Study:
    """Both after plain training, on other text, at a quarter of the rate."""
    novels, other = data[:-1], Path(data[-1])
    begin = _longer(_smallest(novels, ["ce"]), PRETRAINING_STEPS)
    begin["data"] = {**begin["data"], "max_bytes": 8_000_000}
    texts = [str(other / name) for name in ("valid.txt", "test.txt")]

    def recipe(objectives: list[Any]) -> Recipe:
        recipe = _longer(_smallest(novels, objectives), MIDDLE_STEPS)
        recipe["training"]["learning_rate"] /= 4
        recipe["data"] = {**recipe["data"], "files": texts[:1], "validation_files": texts[1:]}
        return recipe

    kept = ("plain", "dispersion", "dispersion, λ 1", "decorrelation")
    variants = {name: LOSSES[name] for name in kept} | SETTINGS
    recipes = {"before": _still(recipe(["ce"]))}
    recipes |= {name: recipe(these) for name, these in variants.items()}
    return _compared("dispersion-middle", recipes, texts[-1:], begin)


def distillation(novels: list[str]) -> Study:
    """A small model alone, larger ones with and without dispersion, and the small one that each
    teaches."""
    small = _longer(_smallest(novels, ["ce"]), DISTILLED_STEPS)
    measure = _measured(novels[-1:])

    def runs(seed: int) -> Iterator[Run]:
        yield Run("small, alone", seed, small, measure)
        for name, loss in (("dispersed", "dispersion"), ("plain", "plain")):
            larger = _gpt2(novels, LOSSES[loss], *SIZES["6 layers, D = 128"])
            larger = _longer(larger, DISTILLED_STEPS)
            yield Run(f"larger, {name}", seed, _still(larger), measure, begin=larger)
            yield Run(f"small, taught by the {name}", seed, small, measure, teacher=larger)

    return Study("dispersion-distillation", [run for seed in range(SEEDS) for run in runs(seed)])


def _longer(recipe: Recipe, steps: int) -> Recipe:
    training = {**recipe["training"], "max_steps": steps, "eval_steps": steps // 6}
    return {**recipe, "training": training}


def _still(recipe: Recipe) -> Recipe:
    """A step at a rate of 0, which leaves the weights that the run began with."""
    training = {"learning_rate": 0.0, "max_steps": 1, "eval_steps": 1}
    return {**recipe, "training": {**recipe["training"], **training}}


def _measured(texts: list[str]) -> measures.Measure:
    return lambda folder: {**measures.curve(folder), **measures.spread_of_states(folder, texts)}


def _compared(
    name: str, recipes: dict[str, Recipe], texts: list[str], begin: Recipe | None = None
) -> Study:
    measure = _measured(texts)
    return Study(
        name,
        [Run(variant, seed, recipe, measure, begin) for seed, variant, recipe in seeds_of(recipes)],
    )


def _smallest(novels: list[str], objectives: list[Any]) -> Recipe:
    return _gpt2(novels, objectives, *SIZES["4 layers, D = 64"])


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
            begun = train_quietly(_still(recipe), Path(other) / "begun", seed)
            along = {"0": measures.spread_of_states(begun, texts)}
        for step in range(SAVED, STEPS + 1, SAVED):
            along[str(step)] = measures.spread_of_states(folder / f"checkpoint-{step}", texts)
        return {**measures.curve(folder), "along": along}

    return Run(name, seed, saved, measure)


if __name__ == "__main__":
    studies = (family, losses, distillation, settings, middle)
    study_command(__doc__, {study.__name__: study for study in studies})
