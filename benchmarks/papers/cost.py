"""What objectives cost: step time and peak memory, as ratios in one run.

    python benchmarks/papers/cost.py objectives [--hidden-size 1024] [--rounds 4]
    python benchmarks/papers/cost.py checkpointing [--hidden-size 256] [--rounds 4]
    python benchmarks/papers/cost.py vocabulary [--hidden-size 256] [--rounds 4]
    python benchmarks/papers/cost.py distillation [--rounds 4]

Llamas with random weights (SYNTHETIC: only time and memory are read) make optimizer steps
(forward, backward, AdamW) with each case in turn, round after round. Time: each case is divided
by the mean of the baseline's steps just before and after it. Memory: the peak resident size of a
process of its own that makes two steps, weights, gradients and optimizer included.

`objectives`: 12 layers, a vocabulary of 32k; the baseline is transformers' own loss,
`model(input_ids, labels=...)`, with all logits at once; `ce` is the same loss through this
project's head. `checkpointing`: the same with and without gradient checkpointing, of a narrow model
that reads eight sequences, where activations are most of the memory. `distillation`: what a
pretrained model's exits are trained with, at the shape of SmolLM2-135M. `vocabulary`: 4 layers,
vocabularies from 2k to 128k; the baseline is `ce`, and headless training is what it is compared
with (headless paper, figure 7b).

Results go to docs/papers/results; a run there is a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from study import RESULTS, write_results
from transformers import LlamaConfig, LlamaForCausalLM

from exitserve_training.forward import ExitPass, MultiExitForward
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import model_parts
from exitserve_training.recipe import parse_recipe
from exitserve_training.skipping import SkipSampler

THREE = [3, 6, 9]
TWELVE = 12


@dataclass(frozen=True)
class Case:
    """One set of objectives."""

    objectives: list[Any]
    exit_layers: list[int]
    steps: int = 1
    """2 where two kinds of steps alternate: both are timed and count half."""
    exit_aware: dict[str, Any] | None = None
    distilled: bool = False
    """Whether an objective has the model itself as its frozen teacher."""
    checkpointing: bool = False
    """Layers keep their inputs alone, and run again in backward."""


def _aligned(**options: Any) -> list[Any]:
    return [{"name": "aligned", **options}]


ALL = list(range(1, TWELVE))
CASES: dict[str, Case] = {
    "ce": Case(["ce"], []),
    "aligned, all 12": Case(_aligned(alternate=False), ALL),
    "aligned, all 12, alternating": Case(_aligned(), ALL, 2),
    "aligned, 3 of 11 sampled, alternating": Case(_aligned(sample=3), ALL, 2),
    "aligned, 3 exits": Case(_aligned(alternate=False), THREE),
    "aligned, 3 exits, alternating": Case(_aligned(), THREE, 2),
    "aligned, 3 exits, alternating, exit-aware": Case(
        _aligned(), THREE, 2, {"thresholds": [0.3, 0.95]}
    ),
    "ce + simreg": Case(["ce", "simreg"], []),
    "ce + nitp": Case(["ce", "nitp"], []),
    "ce + dispersion, all layers": Case(["ce", "dispersion"], []),
    "headless": Case(["headless"], []),
}
WITHOUT: dict[str, Case] = {
    "ce": CASES["ce"],
    "aligned, 3 exits": CASES["aligned, 3 exits"],
    "aligned, 3 exits, exit-aware": Case(
        _aligned(alternate=False), THREE, exit_aware={"thresholds": [0.3, 0.95]}
    ),
}
CHECKPOINTED: dict[str, Case] = {
    f"{name}{how}": dataclasses.replace(case, checkpointing=bool(how))
    for name, case in WITHOUT.items()
    for how in ("", ", checkpointed")
}
WITH_TEACHER: dict[str, Case] = {
    "ce": CASES["ce"],
    "aligned, 1 of 3 sampled, kl_to_last at all from a frozen teacher": Case(
        [
            {"name": "aligned", "sample": 1, "alternate": False, "weight": 0.25},
            {"name": "kl_to_last", "teacher": "initial", "weights": [1.0, 1.0, 1.0, 1.0]},
        ],
        [6, 12, 20],
        distilled=True,
    ),
}
BASELINE = "transformers' loss"
VOCABULARIES = (2_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True)
class Size:
    """Of a model, and of what it reads in a step."""

    layers: int
    hidden: int
    vocabulary: int
    rows: int
    tokens: int
    inner: int | None = None
    """Width inside the MLP; None: 11/4 of `hidden`."""
    key_heads: int | None = None
    """None: as many as there are heads."""
    tied: bool = False


class Bench:
    """One model that takes steps with any case."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.size = size
        config = LlamaConfig(
            num_hidden_layers=size.layers,
            hidden_size=size.hidden,
            intermediate_size=size.inner or size.hidden * 11 // 4,
            num_attention_heads=size.hidden // 64,
            num_key_value_heads=size.key_heads or size.hidden // 64,
            tie_word_embeddings=size.tied,
            vocab_size=size.vocabulary,
            max_position_embeddings=size.tokens,
        )
        self.model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        self.input_ids = torch.randint(size.vocabulary, (size.rows, size.tokens))
        self.optimizer = torch.optim.AdamW(list(self.model.parameters()), lr=1e-5, fused=True)
        self.folder = tempfile.TemporaryDirectory(prefix="exitserve-cost-")

    def baseline(self) -> float:
        """Seconds of a step with transformers' own loss."""
        return self._timed(lambda: self.model(self.input_ids, labels=self.input_ids).loss)

    def case(self, case: Case) -> float:
        """Seconds of a step, the mean over kinds of steps where they alternate."""
        forward = self._installed(case)
        if case.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        seconds = [self._timed(partial(self._loss, step)) for step in range(case.steps)]
        forward.remove()
        self.model.gradient_checkpointing_disable()  # type: ignore[no-untyped-call]
        return statistics.mean(seconds)

    def _installed(self, case: Case) -> MultiExitForward:
        recipe = parse_recipe(
            {
                "output_dir": "-",
                "model": "-",
                "data": {"files": ["-"]},
                "objectives": case.objectives,
                "exit_layers": case.exit_layers,
                "exit_aware": case.exit_aware,
            }
        )
        parts = model_parts(self.model)
        if case.distilled and not any(Path(self.folder.name).iterdir()):
            self.model.save_pretrained(self.folder.name)
        objectives = Objectives(
            recipe.objectives,
            BuildContext(
                exit_layers=case.exit_layers,
                num_layers=self.size.layers,
                hidden_size=self.model.config.hidden_size,
                head=parts.head,
                seed=0,
                initial_model=self.folder.name,
            ),
        )
        skipping = None
        if recipe.exit_aware is not None:
            skipping = SkipSampler(recipe.exit_aware, case.exit_layers, self.size.layers, 0)
        return MultiExitForward(self.model, parts, objectives, (self.size.layers,), skipping)

    def _loss(self, step: int) -> torch.Tensor:
        found = self.model(input_ids=self.input_ids, exit_pass=ExitPass(step, total_steps=100))
        loss: torch.Tensor = found[0]
        return loss

    def _timed(self, loss: Callable[[], torch.Tensor]) -> float:
        gc.collect()
        start = time.perf_counter()
        loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def peak_gib(name: str, size: Size) -> float:
    """Peak resident size of a process that makes two steps."""
    numbers = json.dumps(dataclasses.asdict(size))
    command = [sys.executable, __file__, "peak", name, numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def peak(name: str, size: Size) -> None:
    """What such a process does."""
    bench = Bench(size)
    for _ in range(2):
        bench.baseline() if name == BASELINE else bench.case(
            {**CASES, **CHECKPOINTED, **WITH_TEACHER}[name]
        )
    # Not getrusage, whose peak begins at what the process that started this one had.
    told = Path("/proc/self/status").read_text(encoding="utf-8")
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", told)
    print(int(peak_kib) / 2**20)


def objectives(
    size: Size, rounds: int, cases: Mapping[str, Case] = CASES
) -> Mapping[str, dict[str, float]]:
    """Every case against transformers' loss, round by round."""
    bench = Bench(size)
    found: dict[str, dict[str, float]] = {}
    for turn in track(range(rounds + 1), description="rounds"):
        before = bench.baseline()
        for name, case in cases.items():
            taken, after = bench.case(case), bench.baseline()
            # The machine is not the same from minute to minute; neighbours in time are alike.
            ratio = taken / statistics.mean((before, after))
            # The first round warms up.
            if turn:
                found[f"{name}/{turn - 1}"] = {"time": round(ratio, 4), "seconds": round(taken, 4)}
            before = after
    del bench
    gc.collect()
    base = peak_gib(BASELINE, size)
    for name in track(cases, description="memory"):
        ratio = round(peak_gib(name, size) / base, 4)
        for turn in range(rounds):
            found[f"{name}/{turn}"] |= {"memory": ratio, "baseline_gib": round(base, 3)}
    return found


def vocabularies(size: Size, rounds: int) -> Mapping[str, dict[str, float]]:
    """Headless training against cross-entropy, at each size of vocabulary."""
    found: dict[str, dict[str, float]] = {}
    for vocabulary in track(VOCABULARIES, description="vocabularies"):
        own = dataclasses.replace(size, vocabulary=vocabulary)
        bench = Bench(own)
        plain, headless = CASES["ce"], CASES["headless"]
        before = bench.case(plain)
        for turn in range(rounds + 1):
            taken, after = bench.case(headless), bench.case(plain)
            if turn:
                found[f"{vocabulary}/{turn - 1}"] = {
                    "plain_seconds": round(statistics.mean((before, after)), 4),
                    "headless_seconds": round(taken, 4),
                    "time": round(taken / statistics.mean((before, after)), 4),
                }
            before = after
        del bench
        gc.collect()
        peaks = {f"{name}_gib": round(peak_gib(name, own), 3) for name in ("ce", "headless")}
        for turn in range(rounds):
            found[f"{vocabulary}/{turn}"] |= peaks
    return found


MEASURES: dict[str, tuple[Callable[[Size, int], Any], Size]] = {
    "objectives": (objectives, Size(TWELVE, 1024, 32_000, rows=1, tokens=512)),
    "checkpointing": (
        partial(objectives, cases=CHECKPOINTED),
        Size(TWELVE, 256, 8_000, rows=8, tokens=512),
    ),
    "distillation": (
        partial(objectives, cases=WITH_TEACHER),
        Size(30, 576, 49_152, rows=2, tokens=512, inner=1536, key_heads=3, tied=True),
    ),
    "vocabulary": (vocabularies, Size(4, 256, 0, rows=8, tokens=128)),
}


def main() -> None:
    """Measures, and writes what was found."""
    if sys.argv[1:2] == ["peak"]:
        peak(sys.argv[2], Size(**json.loads(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    measure, size = MEASURES[options.what]
    if options.hidden_size is not None:
        size = dataclasses.replace(size, hidden=options.hidden_size)
    print(f"SYNTHETIC Llama, {size}, {torch.get_num_threads()} threads")
    write_results(RESULTS / f"cost-{options.what}.json", measure(size, options.rounds))


if __name__ == "__main__":
    main()
