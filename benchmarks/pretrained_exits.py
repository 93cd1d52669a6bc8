"""Ways to give a pretrained model exits, at equal tokens.

    python benchmarks/pretrained_exits.py --model DIR --exits 3,6,9 --out DIR [--data 'FILES']

Each way fine-tunes the same model, which was trained without exits, on the same tokens in the same
order; then all are measured on held-out text: by depth the loss, and the share of tokens that are
those of the original model's full depth. Prints a table, and writes it to `report.json` after each
way, so that a run that is stopped goes on where it was. `--ways` chooses some of them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from exitserve.checkpoint.decoder import capture_outputs, decoder_parts, hidden_of
from exitserve_training.pipeline import train
from exitserve_training.recipe import parse_recipe
from exitserve_training.trainer import MultiExitTraining

EMBEDDING_SHARE = 0.1
"""Of the learning rate, for embeddings that learn slowly."""
BOTH = [
    {"name": "aligned", "sample": 1, "alternate": False, "weight": 0.25},
    {"name": "kl_to_last", "teacher": "initial"},
]
LORA = {"rank": 64, "alpha": 64.0}

WAYS: dict[str, dict[str, Any]] = {
    "aligned + KL, all exits at once": {"objectives": BOTH},
    # A recipe wants an objective that trains the model for its task: cross-entropy with no weight.
    "KL alone": {"objectives": [{"name": "ce", "weight": 1e-9}, *BOTH[1:]]},
    "KL alone, weighed by depth": {
        "objectives": [
            {"name": "ce", "weight": 1e-9},
            {"name": "kl_to_last", "teacher": "initial", "weights": "linear", "weight": 4.0},
        ]
    },
    "aligned alone": {"objectives": [{"name": "aligned", "alternate": False}]},
    "from the deepest exit down": {"objectives": BOTH, "stages": True},
    "embeddings at a tenth of the rate": {"objectives": BOTH, "slow_embeddings": True},
    "LoRA": {"objectives": BOTH, "lora": LORA},
}


def main() -> None:
    """Trains and measures each way that has no result yet."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "report.json"
    found: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
    rows = _held_out(options)
    if "before" not in found:
        found["before"] = measured(options.model, options.model, options.exits, rows)
    for way in options.ways:
        if way in found:
            continue
        model = _trained(options, way)
        found[way] = measured(model, options.model, options.exits, rows)
        report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(table(found), flush=True)
    print(table(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of a model without exits")
    parser.add_argument("--data", help="files, globs (default: those of the run that made MODEL)")
    parser.add_argument("--exits", required=True, type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="of a sequence, in tokens")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--lora-rate", type=float, default=3e-3)
    parser.add_argument("--lora-rank", type=int, default=LORA["rank"])
    parser.add_argument("--max-bytes", type=int, help="of text, drawn by the seed")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=[*WAYS])
    return parser.parse_args()


def _recipe(
    options: argparse.Namespace, way: str, model: str, out: Path, exits: list[int], steps: int
) -> dict[str, Any]:
    """A run of one way, or of one of its stages."""
    given = WAYS[way]
    objectives = copy.deepcopy(given["objectives"])
    for one in objectives:
        if "teacher" in one:
            # Of later stages too: the model as it was in the beginning.
            one["teacher"] = options.model
            one.setdefault("weights", [1.0] * (len(exits) + 1))
    recipe = {
        "output_dir": str(out),
        "overwrite": True,
        "model": model,
        "data": _data(options),
        "objectives": objectives,
        "exit_layers": exits,
        "seed": options.seed,
        "bf16": options.bf16,
        "attn_implementation": "sdpa",
        "training": {
            "max_steps": steps,
            "per_device_train_batch_size": options.rows,
            "learning_rate": options.lora_rate if "lora" in given else options.rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(steps // 15, 1),
            "adam_beta2": 0.95,
            "weight_decay": 0.05,
            "save_strategy": "no",
            "report_to": "none",
        },
    }
    if "lora" in given:
        recipe["lora"] = given["lora"] | {"rank": options.lora_rank}
    return recipe


def _data(options: argparse.Namespace) -> dict[str, Any]:
    """Those of the run that made the model, or files."""
    if options.data is None:
        return {"from_run": options.model, "sequence_length": options.length}
    return {
        "files": [options.data],
        "sequence_length": options.length,
        "validation_fraction": 0.03,
        "validation_blocks": 128,
        "max_bytes": options.max_bytes,
    }


def _trained(options: argparse.Namespace, way: str) -> str:
    """The directory of the model that a way makes of `options.model`."""
    model: str = options.model
    deepest = options.exits[::-1]
    stages = [options.exits]
    if WAYS[way].get("stages"):
        stages = [sorted(deepest[: count + 1]) for count in range(len(deepest))]
    for number, exits in enumerate(stages):
        steps = options.steps // len(stages)
        out = options.out / f"{[*WAYS].index(way)}-{number}"
        recipe = parse_recipe(_recipe(options, way, model, out, exits, steps))
        with slow_embeddings() if WAYS[way].get("slow_embeddings") else nullcontext():
            train(recipe)
        model = str(out)
        gc.collect()
    return model


@contextmanager
def slow_embeddings() -> Iterator[None]:
    """Gives the embeddings, which tied heads share, a group of their own in every optimizer."""
    usual: Callable[..., Any] = MultiExitTraining.create_optimizer

    def create(self: MultiExitTraining, model: Any = None) -> Any:
        optimizer = usual(self, model)
        weight: Any = self.language_model.get_input_embeddings().weight
        for group in [*optimizer.param_groups]:
            kept = [one for one in group["params"] if one is not weight]
            if len(kept) < len(group["params"]):
                group["params"] = kept
                rate = group["lr"] * EMBEDDING_SHARE
                optimizer.add_param_group({**group, "params": [weight], "lr": rate})
        return optimizer

    with patch.object(MultiExitTraining, "create_optimizer", create):
        yield


def _held_out(options: argparse.Namespace) -> Tensor:
    """Sequences [B, T] that no way is trained on."""
    run = Path(options.model)
    if options.data is not None:
        run = options.out / "split"
        recipe = _recipe(options, next(iter(WAYS)), options.model, run, [], 1)
        train(parse_recipe(recipe | {"objectives": ["ce"]}))
    key = (run / "data" / "key").read_text(encoding="utf-8")
    held_out = datasets.load_from_disk(str(run / "data" / key))["validation"]
    return torch.tensor(held_out["input_ids"][:])


@torch.no_grad()
def measured(path: str, original: str, exits: list[int], rows: Tensor) -> dict[str, Any]:
    """By depth: the loss in nats, and the share of the original's greedy tokens at full depth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (path, original)
    ]
    for model in models:
        model.to(device).eval()
    last = models[0].config.num_hidden_layers
    sums: dict[int, Tensor] = {}
    for batch in rows.to(device).split(16):  # type: ignore[no-untyped-call]
        taught = models[1](batch, use_cache=False).logits[:, :-1].argmax(-1)
        parts = decoder_parts(models[0])
        with capture_outputs(parts.layers, [*exits, last], hidden_of) as states:
            models[0].model(batch, use_cache=False)
        for depth in (*exits, last):
            logits = parts.classify(states[depth])[:, :-1]
            nats = functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
            )
            equal = (logits.argmax(-1) == taught).sum()
            sums[depth] = sums.get(depth, 0.0) + torch.stack([nats, equal])
    tokens = rows.shape[0] * (rows.shape[1] - 1)
    return {
        str(depth): {"loss": float(one[0]) / tokens, "agreement": float(one[1]) / tokens}
        for depth, one in sums.items()
    }


def table(found: dict[str, Any]) -> str:
    """One row a way: loss / agreement at each depth."""
    depths = [*next(iter(found.values()))]
    lines = [f"| way | {' | '.join(depths)} |", f"|{'---|' * (len(depths) + 1)}"]
    for way, values in found.items():
        cells = [f"{one['loss']:.3f} / {one['agreement']:.3f}" for one in values.values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
