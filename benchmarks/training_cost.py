"""What each objective costs, as ratios to plain cross-entropy on the same model in the same run.

    python benchmarks/training_cost.py [--hidden-size 1024] [--repeats 5]

A Llama of 12 layers with a vocabulary of 32k and random weights (SYNTHETIC: only time and memory
are read) makes optimizer steps (forward, backward, AdamW) with each set of objectives in turn,
round after round. The baseline is transformers' own loss, `model(input_ids, labels=...)`, with
all logits at once; `ce` is the same loss through this project's head. Time: each case is divided
by the mean of the baseline's steps just before and after it; the median of the rounds' ratios,
with the spread. Memory: the peak resident size of a process of its own that
makes two steps, weights, gradients and optimizer included. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exitserve_training.forward import ExitPass, MultiExitForward
from exitserve_training.objectives import build_objectives
from exitserve_training.parts import model_parts
from exitserve_training.recipe import parse_recipe
from exitserve_training.skipping import Skipping

LAYERS, VOCABULARY = 12, 32_000
THREE = [3, 6, 9]


@dataclass(frozen=True)
class Case:
    """One set of objectives."""

    objectives: list[Any]
    exit_layers: list[int]
    steps: int = 1
    """2 where two kinds of steps alternate: both are timed and count half."""
    exit_aware: dict[str, Any] | None = None


def _aligned(**options: Any) -> list[Any]:
    return [{"name": "aligned", **options}]


ALL = list(range(1, LAYERS))
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
BASELINE = "transformers' loss"


class Bench:
    """One model that takes steps with any case."""

    def __init__(self, hidden_size: int, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 11 // 4,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 64,
            vocab_size=VOCABULARY,
            max_position_embeddings=tokens,
        )
        self.model = LlamaForCausalLM(config)
        self.input_ids = torch.randint(VOCABULARY, (rows, tokens))
        self.own = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.own, lr=1e-5)

    def baseline(self) -> float:
        """Seconds of a step with transformers' own loss."""
        return self._timed(lambda: self.model(self.input_ids, labels=self.input_ids).loss)

    def case(self, case: Case) -> float:
        """Seconds of a step, the mean over kinds of steps where they alternate."""
        forward = self._installed(case)
        seconds = [
            self._timed(
                lambda step=step: self.model(
                    input_ids=self.input_ids, exit_pass=ExitPass(step, total_steps=100)
                )[0]
            )
            for step in range(case.steps)
        ]
        forward.remove()
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
        objectives = build_objectives(
            recipe.objectives,
            exit_layers=case.exit_layers,
            num_layers=LAYERS,
            hidden_size=self.model.config.hidden_size,
            head=parts.head,
            seed=0,
        )
        skipping = Skipping(recipe.exit_aware, None, case.exit_layers, LAYERS, 0)
        return MultiExitForward(self.model, parts, objectives, (LAYERS,), skipping)

    def _timed(self, loss: Callable[[], torch.Tensor]) -> float:
        gc.collect()
        start = time.perf_counter()
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def peak_gib(name: str, options: argparse.Namespace) -> float:
    """Peak resident size of a process that makes two rounds of steps."""
    command = [sys.executable, __file__, "--peak", name, "--hidden-size", str(options.hidden_size)]
    command += ["--rows", str(options.rows), "--tokens", str(options.tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    bench = Bench(options.hidden_size, options.rows, options.tokens)
    if options.peak is not None:
        for _ in range(2):
            bench.baseline() if options.peak == BASELINE else bench.case(CASES[options.peak])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    parameters = sum(parameter.numel() for parameter in bench.own)
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    seconds: list[float] = []
    for repeat in range(options.repeats + 1):
        found: dict[str, float] = {}
        plain = [bench.baseline()]
        for name, case in CASES.items():
            taken = bench.case(case)
            plain.append(bench.baseline())
            # The machine is not the same from minute to minute; neighbours in time are alike.
            found[name] = taken / statistics.mean(plain[-2:])
        if repeat == 0:  # the first round warms up
            continue
        seconds += plain
        for name, ratio in found.items():
            ratios[name].append(ratio)
        print(
            f"round {repeat} of {options.repeats}: baseline {statistics.median(plain):.2f} s "
            f"({min(plain):.2f}-{max(plain):.2f})",
            file=sys.stderr,
            flush=True,
        )
    times = {
        name: f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        for name, found in ratios.items()
    }
    print(times, file=sys.stderr, flush=True)
    del bench
    gc.collect()
    base = peak_gib(BASELINE, options)
    print(
        f"SYNTHETIC Llama: {LAYERS} layers, D = {options.hidden_size}, V = {VOCABULARY}, "
        f"{parameters / 1e6:.0f}M parameters, {options.rows} x {options.tokens} tokens, float32, "
        f"{torch.get_num_threads()} threads; baseline {statistics.median(seconds):.2f} s a step, "
        f"{base:.2f} GiB at its peak.\n"
    )
    print("| objectives | time (min to max) | peak memory |\n|---|---|---|")
    for name, of_time in times.items():
        print(f"| {name} | {of_time} | {peak_gib(name, options) / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
