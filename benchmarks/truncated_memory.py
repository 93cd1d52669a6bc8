"""Measures what fewer layers save, against what `exitserve truncate` predicts.

    python benchmarks/truncated_memory.py --folder DIR [--depths 24,12,6]

Writes llama-350m with random weights, cuts it, and starts plain vLLM on each checkpoint and
exitserve with `--max-layers` on the full one, each in a process of its own, on a CPU, with a
key-value cache of 1 GiB. Compares anonymous memory (mapped files may be dropped at any time) and
the tokens that vLLM finds room for. Memory depends on no clock, so a busy machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from resident_memory import resident

NAME = "llama-350m"
CACHE_GIB = 1
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    # Or the C library keeps a part of what loading frees: 14 % of the layers, measured.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
POLL_SECONDS = 0.02
READY = "READY"


def write_weights(folder: Path) -> None:
    """Writes the shape's checkpoint with random weights, bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from exitserve.synthetic_shapes import write_checkpoint

    folder.mkdir(parents=True)
    write_checkpoint(NAME, folder)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)


def anonymous_bytes(process: int) -> int:
    """Anonymous and shared memory of a process and all its descendants."""
    found = resident(process)
    return found["RssAnon"] + found["RssShmem"]


def child(model: str, max_layers: int | None) -> None:
    """Starts one engine, makes some tokens, and waits."""
    from exitserve.engine.launch import (
        greedy_params,
        start_engine,
        start_plain_engine,
        stop_engine,
    )

    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    if max_layers is None:
        engine = start_plain_engine(model, **options)
    else:
        engine = start_engine(model, exits={"max_layers": max_layers}, **options)
    prompt: Any = [{"prompt_token_ids": list(range(3, 200))}]
    engine.generate(prompt, greedy_params(8), use_tqdm=False)
    print(READY, flush=True)
    sys.stdin.readline()
    stop_engine(engine)


def measured(model: Path, max_layers: int | None) -> dict[str, int]:
    """Starts `child` and samples its memory: at the peak, and at rest after some tokens."""
    command = [sys.executable, __file__, "--child", str(model)]
    command += [] if max_layers is None else ["--max-layers", str(max_layers)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | SETTINGS,
    )
    assert process.stdin is not None and process.stdout is not None
    peak, ready = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ready.is_set():
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(POLL_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    tokens = 0
    for line in process.stdout:
        if found := re.search(r"KV cache size: ([\d,]+) tokens", line):
            tokens = int(found[1].replace(",", ""))
        if line.startswith(READY):
            break
    ready.set()
    watcher.join()
    rest = anonymous_bytes(process.pid)
    process.communicate("\n", timeout=120)
    return {"tokens": tokens, "rest": rest, "peak": peak}


def compare(folder: Path, depths: list[int]) -> list[dict[str, Any]]:
    """One row for each engine and pair of neighbouring depths, measured against predicted."""
    from exitserve.checkpoint import read_config
    from exitserve.cli import main as exitserve
    from exitserve.stored_weights import read_weights
    from exitserve.truncation.fit import sizes_of

    full = folder / NAME
    if not full.is_dir():
        write_weights(full)
    sizes = sizes_of(read_config(full), read_weights(full).tensors, "bfloat16")
    rows = []
    for engine in ("plain vLLM, truncated", "exitserve --max-layers"):
        found = {}
        for depth in depths:
            cut = folder / f"{NAME}-{depth}"
            if not cut.is_dir():
                exitserve(["truncate", str(full), "--layers", str(depth), "--out", str(cut)])
            plain = engine.startswith("plain")
            found[depth] = measured(cut if plain else full, None if plain else depth)
            predicted = (CACHE_GIB << 30) // (depth * sizes.kv_token)
            print(engine, depth, found[depth], "predicted tokens", predicted, flush=True)
        for deep, shallow in pairwise(depths):
            saved = sizes.weights(deep) - sizes.weights(shallow)
            rows.append(
                {
                    "engine": engine,
                    "depths": [deep, shallow],
                    "predicted_mib": saved >> 20,
                    **{
                        f"{when}_ratio": (found[deep][when] - found[shallow][when]) / saved
                        for when in ("rest", "peak")
                    },
                }
            )
    return rows


def main() -> None:
    """Parses the options and prints one JSON row for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for the checkpoints, 1.5 GB")
    parser.add_argument("--depths", default="24,12,6", help="descending (default 24,12,6)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--max-layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.max_layers)
        return
    for row in compare(args.folder, [int(part) for part in args.depths.split(",")]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
