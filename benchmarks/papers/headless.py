"""The headless paper's claims, on small models trained here.

    python benchmarks/papers/headless.py decoders --data NOVELS/*.txt
    python benchmarks/papers/headless.py batches --data NOVELS/*.txt
    python benchmarks/papers/headless.py words --data NOVELS/*.txt
    python benchmarks/papers/headless.py encoders --data NOVELS/*.txt SST-2

`decoders`: a head recovered from a headless decoder, against plain pretraining with as many
tokens (table 3). `batches`: the same with more sequences in the micro-batch, whose tokens are what
a state is contrasted with, and with a head trained for 2 % and 15 % of the steps (figure 8).
`words`: both kinds of decoder, after as many tokens, at the last word of passages of the held-out
novels, in place of LAMBADA (table 3). `encoders`: both kinds of BERT fine-tuned on SST-2 (train.tsv
and test.tsv of the folder that is given last), after as many tokens (table 1). Three seeds a
variant; results go to docs/papers/results. Step time against vocabulary size is in cost.py.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import measures
from decoders import Recipe, decoder
from study import SEEDS, Run, Study, seeds_of, study_command, train_quietly

STEPS = 400
HEAD_STEPS = 60
"""Of them, what a headless decoder's head gets: 15 %."""
BATCHES = (4, 16, 64)
"""Sequences of 128 tokens in a step."""
SHARES = (0.02, 0.15)
"""Of the steps of pretraining, those that a head is trained for afterwards."""
FINE_TUNING_STEPS = 400


def decoders(novels: list[str]) -> Study:
    """Plain for all steps, or headless for most of them and a head for the rest."""
    plain = _untied(novels, "ce", STEPS)
    headless = _untied(novels, "headless", STEPS - HEAD_STEPS)
    variants = {"plain": (plain, 0.0), "headless, then a head": (headless, 1.0e-3)}
    variants["headless, then a head at a tenth of the rate"] = (headless, 1.0e-4)
    return Study(
        "headless-decoders",
        [
            Run(name, seed, recipe, _with_head(novels, seed, rate))
            for seed, name, (recipe, rate) in seeds_of(variants)
        ],
    )


def batches(novels: list[str]) -> Study:
    """Plain and headless with ever more sequences a step, for the same number of steps."""
    recipe = functools.partial(_shorter, novels)

    def with_heads(sequences: int, seed: int) -> measures.Measure:
        def measure(folder: Path) -> dict[str, Any]:
            if sequences == 0:
                return measures.quality(folder)
            return {
                f"{share:.0%}": _taught(
                    folder, recipe("ce", sequences), seed, round(share * STEPS), 1.0e-3
                )
                for share in SHARES
            }

        return measure

    variants = {
        f"{kind}, {sequences} sequences": (recipe(objective, sequences), taught)
        for sequences in BATCHES
        for kind, objective, taught in (("plain", "ce", 0), ("headless", "headless", sequences))
    }
    return Study(
        "headless-batches",
        [
            Run(name, seed, pretraining, with_heads(taught, seed))
            for seed, name, (pretraining, taught) in seeds_of(variants)
        ],
    )


def words(novels: list[str]) -> Study:
    """Plain for all steps; headless for 85 % of them, before and after a head's 15 %."""
    plainly, headlessly = (_shorter(novels, one, 16) for one in ("ce", "headless"))
    headlessly["training"]["max_steps"] = STEPS - HEAD_STEPS

    def read(folder: Path) -> dict[str, Any]:
        return measures.last_words(folder, novels[-2:])

    def plain(folder: Path) -> dict[str, Any]:
        return {**measures.quality(folder), **read(folder)}

    def headless(seed: int) -> measures.Measure:
        def measure(folder: Path) -> dict[str, Any]:
            taught = _taught(folder, plainly, seed, HEAD_STEPS, 1.0e-3, read)
            taught["head_seconds"] = taught.pop("seconds")
            return {**taught, "no head": measures.last_words(folder, novels[-2:], True)}

        return measure

    return Study(
        "headless-words",
        [
            run
            for seed in range(SEEDS)
            for run in (
                Run("plain", seed, plainly, plain),
                Run("headless", seed, headlessly, headless(seed)),
            )
        ],
    )


def _shorter(novels: list[str], objective: str, sequences: int) -> Recipe:
    recipe = decoder(novels, [objective], tie_word_embeddings=False, num_hidden_layers=3)
    recipe["data"] |= {"sequence_length": 128, "max_bytes": 8_000_000}
    recipe["training"] |= {"per_device_train_batch_size": sequences, "eval_strategy": "no"}
    return recipe


def _untied(novels: list[str], objective: str, steps: int) -> Recipe:
    recipe = decoder(novels, [objective], tie_word_embeddings=False)
    recipe["training"]["max_steps"] = steps
    return recipe


def _with_head(novels: list[str], seed: int, rate: float) -> measures.Measure:
    """What a decoder's head says; at a rate above 0, after it was taught from the embeddings."""

    def measure(folder: Path) -> dict[str, Any]:
        pretraining = _report(folder)["seconds"]
        if rate == 0.0:
            return {**measures.curve(folder), "training_seconds": pretraining}
        found = _taught(folder, decoder(novels, ["ce"]), seed, HEAD_STEPS, rate)
        seconds = round(pretraining + found.pop("seconds"), 1)
        return {**found, "training_seconds": seconds}

    return measure


def _taught(
    folder: Path,
    recipe: Recipe,
    seed: int,
    steps: int,
    rate: float,
    measure: measures.Measure = lambda _: {},
) -> dict[str, Any]:
    """What a headless model says after so many steps with a head, which begins as its embeddings.

    Args:
        folder: the headless model.
        recipe: the data, and how to train; its config and tokenizer are the model's.
        seed: that of pretraining, so that the same text is held out.
        steps: optimizer steps.
        rate: the learning rate.
        measure: what else is kept of it.
    """
    recipe = {key: value for key, value in recipe.items() if key not in ("config", "tokenizer")}
    recipe |= {"model": str(folder), "head_from_embeddings": True}
    changes: dict[str, Any] = {
        "max_steps": steps,
        "learning_rate": rate,
        "warmup_steps": steps // 5,
    }
    # What a short run logs is its end.
    changes |= {"eval_strategy": "steps", "eval_steps": min(steps, 50)}
    with tempfile.TemporaryDirectory() as other:
        head = train_quietly(recipe, Path(other) / "head", seed, **changes)
        report = _report(head)
        (begun,) = report["initial_layers"].values()
        return {
            **measures.curve(head),
            **measure(head),
            "embeddings_as_head": round(begun["loss"], 5),
            "seconds": report["seconds"],
        }


def encoders(data: list[str]) -> Study:
    """BERTs pretrained in both ways, or not at all, then fine-tuned alike."""
    novels, sentences = data[:-1], Path(data[-1])
    ways = {"not pretrained": "ce", "masked language model": "ce", "headless": "headless"}
    return Study(
        "headless-encoders",
        [
            Run(way, seed, _bert(novels, ways[way], way), _fine_tuned(sentences, seed))
            for seed, way, _ in seeds_of(ways)
        ],
    )


def _bert(novels: list[str], objective: str, way: str) -> Recipe:
    recipe = decoder(novels, [objective])
    recipe["config"] = {
        "architecture": "bert",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    recipe["tokenizer"] = {"train_bpe": {"vocab_size": 4096}}
    recipe["data"] |= {"sequence_length": 128, "max_bytes": 4_000_000}
    recipe["training"] |= {"max_steps": 600, "per_device_train_batch_size": 16}
    recipe["training"] |= {"learning_rate": 1.0e-3, "eval_steps": STEPS}
    if way == "not pretrained":
        # A step at a rate of 0: the weights it began with.
        recipe["training"] |= {"max_steps": 1, "learning_rate": 0.0, "eval_strategy": "no"}
    return recipe


def _fine_tuned(sentences: Path, seed: int) -> measures.Measure:
    """Accuracy on sentences after fine-tuning."""

    def measure(folder: Path) -> dict[str, Any]:
        recipe: Recipe = {
            "model": str(folder),
            "data": {
                "format": "labelled",
                "files": [str(sentences / "train.tsv")],
                "validation_files": [str(sentences / "test.tsv")],
                "sequence_length": 64,
                "text_field": "sentence",
            },
            "exit_layers": [],
            "objectives": [{"name": "ce", "balanced": True}],
            "training": {
                "max_steps": FINE_TUNING_STEPS,
                "per_device_train_batch_size": 32,
                "per_device_eval_batch_size": 64,
                "learning_rate": 3.0e-4,
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": FINE_TUNING_STEPS // 10,
            },
        }
        with tempfile.TemporaryDirectory() as other:
            report = _report(train_quietly(recipe, Path(other) / "fine-tuned", seed))
        return {
            "accuracy": round(report["last_layer"]["accuracy"], 5),
            "fine_tuned_loss": round(report["last_layer"]["loss"], 5),
            "training_seconds": _report(folder)["seconds"],
        }

    return measure


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


if __name__ == "__main__":
    studies = (decoders, batches, words, encoders)
    study_command(__doc__, {study.__name__: study for study in studies})
