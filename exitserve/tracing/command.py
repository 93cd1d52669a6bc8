"""The command. Light to import: torch is loaded once the arguments are checked."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from exitserve.arguments import (
    add_adapter,
    add_revision,
    at_least,
    check_context,
    threshold_or_auto,
    with_adapter,
)
from exitserve.calibration_record import EXIT_CHECKS
from exitserve.checkpoint import read_config
from exitserve.errors import ExitServeError
from exitserve.files import check_writable
from exitserve.policy import AUTO, EXIT_MODES

DESCRIPTION = """\
Answer a prompt with the oracle, and write what every exit layer would have said to each token.

The playground of a server (exitserve serve MODEL --playground) opens the file: drop it there.

  exitserve trace MODEL --prompt "def read(path):" --exit-threshold 0.5 --out trace.json

The answer is greedy, and token by token what a server gives in float32. Without a field, requests
exit as on a server without one: by the checkpoint's calibration, or else at full depth.
"""
FIELDS = ("exit_threshold", "exit_target", "exit_mode", "exit_layer")


def add_trace(subparsers: Any) -> None:
    """Adds the `trace` command."""
    parser = subparsers.add_parser(
        "trace",
        help="write what every exit layer says to each token of an answer",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    add_revision(parser)
    add_adapter(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="what to continue")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with the prompt")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="a JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    parser.add_argument(
        "--max-tokens", type=int, default=48, metavar="N", help="most tokens to generate"
    )
    exits = parser.add_argument_group("when tokens exit, as in a request")
    exits.add_argument(
        "--exit-threshold", type=threshold_or_auto, metavar="T", help=f"a number, or {AUTO}"
    )
    exits.add_argument("--exit-target", type=float, metavar="A", help="agreement to keep")
    exits.add_argument(
        "--mode", dest="exit_mode", choices=EXIT_MODES, help="exit_mode; verify tells drafts too"
    )
    exits.add_argument("--exit-layer", type=int, metavar="N", help="the exit of every token")
    parser.add_argument(
        "--exit-checks",
        choices=EXIT_CHECKS,
        default="screened",
        help="screened: screens leave out checks, as on a server (default); all: every check",
    )
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> int:
    fields = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    prompt = _prompt_of(args)
    at_least(1, args.max_tokens, "--max-tokens")
    _check_out(args.out, overwrite=args.overwrite)
    from exitserve.engine.launch import check_rules

    args = with_adapter(args)
    config = read_config(args.model, args.revision)
    rules = check_rules(args.model, {"exit_checks": args.exit_checks}, args.revision)
    policy = replace(rules, modes=(*rules.modes, "verify")).policy_for(fields)

    from rich.console import Console
    from transformers import AutoTokenizer

    from exitserve.files import replace_file
    from exitserve.hub import local_checkpoint
    from exitserve.reference import load_reference
    from exitserve.tracing.format import Trace, to_json
    from exitserve.tracing.oracle import traced_tokens

    console = Console()
    directory = str(local_checkpoint(args.model, args.revision))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    check_context(
        len(tokenizer.encode(prompt)) + args.max_tokens, config, "prompt and --max-tokens"
    )
    with console.status("answering ..."):
        reference = load_reference(directory, exit_checks=args.exit_checks, device="auto")
        tokens = tuple(traced_tokens(reference, tokenizer, prompt, args.max_tokens, policy))
    trace = Trace(
        made_by="oracle",
        model=args.model_name,
        num_layers=rules.num_layers,
        exit_layers=rules.exit_layers,
        criterion=rules.criterion,
        fields=fields,
        prompt=prompt,
        tokens=tokens,
    )
    text = json.dumps(to_json(trace), ensure_ascii=False, indent=1)
    replace_file(args.out, f"{text}\n".encode())
    _show(console, trace, args.out)
    return 0


def _check_out(out: Path, *, overwrite: bool) -> None:
    """Makes the file's folder; raises `ExitServeError` if it could not be written at the end."""
    from exitserve.report import prepare_out_dir

    if out.is_dir():
        raise ExitServeError(
            f"--out '{out}' is a folder; give a file, for example {out}/trace.json."
        )
    if out.exists() and not overwrite:
        raise ExitServeError(f"'{out}' exists; add --overwrite to replace it.")
    check_writable(prepare_out_dir(out.parent, overwrite=True), "give another --out")


def _prompt_of(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        prompt: str = args.prompt
    else:
        try:
            prompt = args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ExitServeError(
                f"cannot read --prompt-file '{args.prompt_file}': {error}"
            ) from error
    if not prompt:
        raise ExitServeError("the prompt is empty; give some text to continue.")
    return prompt


def _show(console: Any, trace: Any, out: Path) -> None:
    """Prints how many tokens stopped where."""
    from exitserve.report import terminal_table

    depths = [token.depth for token in trace.tokens]
    rows = [
        [str(depth), str(depths.count(depth)), f"{depths.count(depth) / len(depths):.0%}"]
        for depth in (*trace.exit_layers, trace.num_layers)
    ]
    mean = sum(depths) / len(depths)
    title = f"{len(depths)} tokens, mean depth {mean:.2f} of {trace.num_layers}"
    if drafts := [draft for token in trace.tokens for draft in token.drafts or ()]:
        title += f", {sum(one.accepted for one in drafts)} of {len(drafts)} drafts accepted"
    console.print(terminal_table(title, ["depth", "tokens", "share"], rows))
    console.print(f"{out}: drop it on the playground of a server to look at it.", soft_wrap=True)
