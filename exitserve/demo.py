"""`exitserve demo`: complete code with the bundled model, show depths, compare with plain vLLM."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from exitserve.checkpoint.block import parse_multi_exit, read_config
from exitserve.errors import ExitServeError
from exitserve.policy import AUTO
from exitserve.settings import exit_fields, label_of

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "exit-py-19m"
"""In the repository, not in the wheel."""

THRESHOLDS = (0.7, 0.4)
"""Of a checkpoint that promises nothing."""
LOWER_TARGET = 0.95
"""Shown beside what a calibrated checkpoint promises, if it can promise that too."""
DRAFTS_ABOVE = 0.5
"""The confidence above which mode "verify" drafts."""
PROMPTS = (
    "def read_lines(path):\n    with open(path",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "def test_empty_list():\n    assert",
)
MAX_TOKENS = 48
PALETTE = ("bold green", "green", "yellow", "red")
"""Colours from the shallowest exit to full depth."""


def add_demo(subparsers: Any, run_command: Callable[[list[str]], int]) -> None:
    """Adds the `demo` command.

    Args:
        subparsers: of the command line.
        run_command: runs another command from its arguments; returns the exit code.
    """
    parser = subparsers.add_parser(
        "demo",
        help="complete code with the bundled model, show every token's depth, compare with "
        "plain vLLM",
        description="Completes code with and without exits and prints each token in the colour "
        "of its depth (by the oracle in PyTorch: the tokens that a server gives in float32), "
        "then runs a small benchmark of the engine against plain vLLM. Takes about five minutes "
        "on two cores with AVX-512, and longer without.",
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="another checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the report")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="of each answer that is compared (default %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.7,
        metavar="S",
        help="of each timed pass, at least (default %(default)g)",
    )
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="do not compile the engines that are compared: they start sooner and run slower",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="instead, serve the model on loopback with its playground until you stop it",
    )
    parser.add_argument("--port", type=int, default=8000, help="of --serve (default 8000)")
    parser.set_defaults(run=partial(demo, run_command=run_command))


def demo(args: argparse.Namespace, run_command: Callable[[list[str]], int]) -> int:
    """Runs the demo; returns the exit code of its benchmark.

    Raises:
        ExitServeError: there is no model to show.
    """
    from rich.console import Console

    if not args.model.is_dir():
        raise ExitServeError(
            f"no model at '{args.model}': the bundled model is in the repository, not in the "
            f"wheel; clone it, or give a checkpoint with --model DIR."
        )
    if args.serve:
        own = ["--host", "127.0.0.1", "--port", str(args.port), "--playground"]
        own += ["--enforce-eager"] if args.enforce_eager else []
        return run_command(["serve", str(args.model), *own])
    console = Console()
    _show_completions(console, args.model)
    console.rule("side by side with plain vLLM")
    report = args.out / "bench"
    bench = ["bench", str(args.model), *compared(args.model)]
    bench += ["--requests", str(len(PROMPTS)), "--max-tokens", str(args.max_tokens)]
    bench += ["--seconds", f"{args.seconds:g}"]
    bench += ["--overwrite", "--out", str(report)]
    bench += ["--enforce-eager"] if args.enforce_eager else []
    console.print(f"exitserve {' '.join(bench)}", style="dim", soft_wrap=True)
    if code := run_command(bench):
        return code
    console.print()
    for line in verdict(json.loads((report / "report.json").read_text())["cases"]):
        console.print(line)
    # Not wrapped: people copy paths and commands.
    console.print(
        f"\nThe report: {report / 'report.md'} (plot and JSON beside it).", soft_wrap=True
    )
    exits = f" --exit-threshold {THRESHOLDS[0]}"
    if _promises(args.model):
        exits = ""  # the calibrated thresholds are its default
    serve = f"exitserve serve {args.model}{exits} --playground"
    console.print(f"Serve it yourself:  {serve}", soft_wrap=True)
    return 0


def _promises(model: Path) -> dict[str, float]:
    """What a checkpoint promises: agreements, by the names that `exitserve bench` has for them."""
    block = parse_multi_exit(read_config(model))
    calibration = None if block is None else block.calibration
    chosen = None if calibration is None else calibration.chosen.agreement
    if calibration is None or chosen is None:
        return {}
    lower = chosen > LOWER_TARGET and calibration.for_agreement(LOWER_TARGET) is not None
    return {AUTO: chosen} | ({f"{AUTO}:{LOWER_TARGET}": LOWER_TARGET} if lower else {})


def shown(model: Path) -> dict[str, dict[str, Any]]:
    """Whose completions are shown: by title, exit fields of requests."""
    promised: dict[str, dict[str, Any]] = {
        f"promised {agreement:.0%} of full depth's tokens": dict(exit_fields(word))
        for word, agreement in _promises(model).items()
    }
    tried = {f"exit threshold {one}": {"exit_threshold": one} for one in THRESHOLDS}
    return {"full depth": {"exit_mode": "off"}} | (promised or tried)


def compared(model: Path) -> list[str]:
    """Options of `exitserve bench`: the same, and for calibrated checkpoints lossless drafts."""
    promises = _promises(model)
    if not promises:
        return ["--thresholds", ",".join(map(str, THRESHOLDS))]
    return ["--thresholds", ",".join([*promises, str(DRAFTS_ABOVE)]), "--modes", "verify"]


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on what gained, by batch size, and where a gain comes from."""
    lines = []
    for size in sorted({case["batch_size"] for case in cases}):
        exits = [
            case
            for case in cases
            if case["batch_size"] == size and case["mode"] not in ("plain", "off", "rival")
        ]
        best = max(exits, key=lambda case: float(case["wall_speedup"]["median"]))
        wall, label = best["wall_speedup"], label_of(best)
        together = "one request at a time" if size == 1 else f"{size} requests together"
        full = [
            f" (Exits off: {case['wall_speedup']['median']:.2f}.)"
            for case in cases
            if case["batch_size"] == size and case["mode"] == "off"
        ]
        lines.append(
            f"With {together}, {label} has the best wall speedup: {wall['median']:.2f} "
            f"({wall['min']:.2f} to {wall['max']:.2f}), its tokens {best['agreement']:.1%} equal "
            f"to full depth's.{''.join(full)}"
        )
    return [
        *lines,
        "What exits off gains, others gain as well, and it has nothing to do with exits.",
        "Exits gain by layers that need not run. With several requests together a layer runs as "
        "long as one of them needs it, so there is less to gain, or nothing.",
    ]


def _show_completions(console: Any, model: Path) -> None:
    """Completes each prompt in each way, by the oracle, and prints the tokens by depth."""
    from transformers import AutoTokenizer

    from exitserve.engine.launch import check_rules
    from exitserve.reference import load_reference

    rules = check_rules(model, {})
    depths = [*rules.exit_layers, rules.num_layers]
    styles = {
        depth: PALETTE[rank * len(PALETTE) // len(depths)] for rank, depth in enumerate(depths)
    }
    with console.status("loading the model ..."):
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        # On a CPU: engines start in this process later, and share a GPU's memory without it.
        oracle = load_reference(str(model))
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt)
        for title, fields in shown(model).items():
            answer = oracle.decode(
                prompt_ids, MAX_TOKENS, rules.policy_for(fields).drafting(rules.exit_layers)
            )
            mean = sum(answer.exit_layers) / len(answer.exit_layers)
            speedup = rules.num_layers / mean
            console.rule(
                f"{title}: mean depth {mean:.2f}, depth speedup {speedup:.2f}", align="left"
            )
            # What each token adds: alone, it might lose the blank before it.
            ids = answer.token_ids
            spans = (ids[:end] for end in range(len(ids) + 1))
            texts = [str(tokenizer.decode([*prompt_ids, *span])) for span in spans]
            tokens = [longer[len(text) :] for text, longer in pairwise(texts)]
            console.print(_coloured(prompt, tokens, answer.exit_layers, styles))


def _coloured(prompt: str, tokens: list[str], depths: list[int], styles: dict[int, str]) -> Any:
    """The completion with each token in the colour of its depth, and a legend."""
    from rich.text import Text

    text = Text(prompt, style="dim")
    for token, depth in zip(tokens, depths, strict=True):
        text.append(token, style=styles[depth])
    text.append("\n")
    for depth, style in styles.items():
        text.append(f" depth {depth}: {depths.count(depth)} tokens ", style=f"reverse {style}")
    return text
