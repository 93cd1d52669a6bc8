"""What the calls of the worker cost: full depth on our engines, beside plain vLLM.

vLLM asks its worker twice a step, three times with drafts; `exitserve.engine.hooks.executor` once.
Every engine answers the same prompts at full depth, in turns.

    OMP_NUM_THREADS=2 python benchmarks/worker_calls.py models/exit-py-19m
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter
from typing import Any

from exitserve.engine.launch import (
    greedy_params,
    prepare_environment,
    start_engine,
    start_plain_engine,
)

TOKENS = 128
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
}
VERIFY = {"mode": "verify", "exit_threshold": 0.8}
VLLMS = {"distributed_executor_backend": "mp"}
"""vLLM's own executor."""


def engines(model: str) -> dict[str, Any]:
    """Engines that answer at full depth, by name."""
    return {
        "plain vLLM": start_plain_engine(model, **OPTIONS),
        "off, 2 calls": start_engine(model, exits={"mode": "off"}, **VLLMS, **OPTIONS),
        "off, 1 call": start_engine(model, exits={"mode": "off"}, **OPTIONS),
        "verify, no drafts, 3 calls": start_engine(model, exits=VERIFY, **VLLMS, **OPTIONS),
        "verify, no drafts, 1 call": start_engine(model, exits=VERIFY, **OPTIONS),
    }


def seconds(engine: Any, rows: int) -> float:
    """Of `TOKENS` greedy tokens at full depth for each of `rows` prompts."""
    prompts = [f"def function_{index}(a, b):\n    " for index in range(rows)]
    started = perf_counter()
    engine.generate(prompts, greedy_params(TOKENS, {"exit_mode": "off"}), use_tqdm=False)
    return perf_counter() - started


def main() -> None:
    """Prints ms a step and the wall speedup over plain vLLM, median and range of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=13)
    args = parser.parse_args()
    prepare_environment()
    started = engines(args.model)
    for rows in (1, 8):
        for engine in started.values():
            seconds(engine, rows)
        took: dict[str, list[float]] = {name: [] for name in started}
        for _ in range(args.rounds):
            for name in random.sample(list(started), len(started)):
                took[name].append(seconds(started[name], rows))
        for name, times in took.items():
            ratios = sorted(p / t for p, t in zip(took["plain vLLM"], times, strict=True))
            print(
                f"batch {rows}, {name}: {median(times) / TOKENS * 1e3:.2f} ms a step, wall speedup "
                f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
