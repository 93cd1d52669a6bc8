"""Benchmarks on random weights, whose exits are forced: the machinery alone, without quality.

    python benchmarks/synthetic.py llama-350m --exit-layers 6,12 --out DIR
    python benchmarks/synthetic.py llama-1.3b --exit-layers 6 --confidence 0.8 \\
        --modes confidence,verify --acceptance 0.9 --out DIR

The report is that of `exitserve bench`. Every token exits at each of the layers in turn; with
--confidence each check passes with that probability instead, and each draft is accepted with
another (`exitserve.bench.forced`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from exitserve.arguments import any_mode, batch_sizes_of, modes_of, numbers
from exitserve.bench.command import run_job
from exitserve.bench.settings import BenchJob
from exitserve.engine.launch import check_rules
from exitserve.errors import ExitServeError
from exitserve.settings import PLAIN, Setting, make_settings

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 24,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-350m": {
        **_LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "llama-1.3b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Name to `config.json`."""
NEVER_PASSED = 0.99
"""A threshold that is checked and never passed: random weights give confidences near 1/V."""
PROMPT_TOKENS = 32
MIN_CONTEXT = 512
"""Least context of the engines: enough for short prompts and a few hundred tokens."""


def write_checkpoint(name: str, directory: Path) -> None:
    """Writes the `config.json` of a shape; the engine draws the weights."""
    text = json.dumps(SHAPES[name], indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def job_of(args: argparse.Namespace, model_dir: Path) -> BenchJob:
    """The job that the arguments ask for."""
    layers = sorted(numbers(args.exit_layers, int, "--exit-layers"))
    modes = modes_of(args.modes)
    options = {"exit_rows": "all", "exit_layers": layers, "mode": "off"}
    rules = any_mode(check_rules(model_dir, options))
    batch_sizes = batch_sizes_of(args.batch_sizes)
    by_lot = args.confidence is not None
    threshold = 0.5 if by_lot else NEVER_PASSED
    fixed = [] if by_lot else [Setting(mode="fixed", exit_layer=layer) for layer in layers]
    count = max(args.requests, *batch_sizes)
    random_token = partial(Random(0).randrange, 3, _LLAMA["vocab_size"])
    prompts = [tuple(random_token() for _ in range(args.prompt_tokens)) for _ in range(count)]
    return BenchJob(
        model_dir=model_dir,
        model_name=f"synthetic {args.shape}",
        synthetic=True,
        rules=rules,
        settings=(PLAIN, *make_settings(rules, [threshold], modes), *fixed),
        batch_sizes=tuple(batch_sizes),
        prompts=tuple(prompts),
        requests=args.requests,
        prompt_source=f"{args.prompt_tokens} random tokens each",
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        seconds=args.seconds,
        dtype="auto",
        enforce_eager=args.enforce_eager,
        max_model_len=max(MIN_CONTEXT, args.prompt_tokens + args.max_tokens),
        exit_rows="all",
        num_drafts=args.num_drafts,
        forced={"confidence": args.confidence, "acceptance": args.acceptance} if by_lot else None,
    )


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--exit-layers", required=True, metavar="N,N")
    parser.add_argument("--modes", default="", metavar="M,M", help="of checks (confidence)")
    parser.add_argument("--confidence", type=float, metavar="P", help="that a check passes")
    parser.add_argument("--acceptance", type=float, default=1.0, metavar="P", help="of a draft")
    parser.add_argument("--num-drafts", type=int, metavar="N")
    parser.add_argument("--batch-sizes", default="1,8", metavar="B,B")
    for flag, default in (
        ("--prompt-tokens", PROMPT_TOKENS),
        ("--requests", 2),
        ("--max-tokens", 64),
        ("--repeats", 2),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"({default})")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timed pass, at least")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--out", required=True, metavar="DIR")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exitserve-") as directory:
        write_checkpoint(args.shape, Path(directory))
        try:
            run_job(job_of(args, Path(directory)), args.out, overwrite=False)
        except ExitServeError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
