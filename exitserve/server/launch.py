"""`exitserve serve`: vLLM's own API server, started with our parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from exitserve.checkpoint import read_config
from exitserve.engine.launch import (
    check_rules,
    engine_options,
    prepare_environment,
    suit_runner,
)
from exitserve.engine.options import EXIT_CHECKS, KEY
from exitserve.errors import ExitServeError, nearest
from exitserve.first_layers import doubt
from exitserve.policy import AUTO, MODES, NUM_DRAFTS
from exitserve.server.refusals import check_shadow_rate, refuse, refuse_checkpoint

DESCRIPTION = """\
Serve a multi-exit checkpoint on vLLM's OpenAI-compatible server.

Every flag of `vllm serve` may follow; a few that matter here:
  --port 8000   --max-model-len 4096   --dtype float32   --enforce-eager

Requests choose their own exits in vllm_xargs:
  {"exit_threshold": 0.8}   exit where the confidence is above 0.8 (1: full depth)
  {"exit_target": 0.98}     ... above thresholds that keep 98 % of tokens those of full depth
  {"exit_mode": "defer"}    ... and compute its deeper keys and values exactly, a little later
  {"exit_layer": 6}         every token exits at layer 6
  {"exit_trace": true}      tell the depth of each token in the response
"""


def add_serve(subparsers: Any) -> None:
    """Adds the `serve` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model on vLLM, each token at its own depth",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="checkpoint directory or hub id")
    _add_default(parser)
    _add_exits(parser)
    parser.add_argument(
        "--shadow-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="share of requests whose answers full depth judges afterwards, for the metrics of "
        "live quality: 0.01 is one in a hundred (default 0: none)",
    )
    parser.set_defaults(run=serve, takes_rest=True)


def _add_default(parser: argparse.ArgumentParser) -> None:
    """What a request gets that asks for nothing."""
    parser.add_argument(
        "--exit-threshold",
        type=_threshold,
        metavar="T",
        help="default confidence threshold, or auto: those that exitserve calibrate found "
        "(default: auto where there are some, else full depth for requests that ask for nothing)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="default mode (default: what the other options imply). confidence: deeper keys and "
        "values of a token that exits are approximated at once; defer: they are computed exactly, "
        "with a later token, so answers are nearer to full depth; verify: full depth judges the "
        "tokens that exit, several at a time, so answers are those of full depth",
    )
    parser.add_argument(
        "--num-drafts",
        type=int,
        metavar="N",
        help=f"mode verify: most tokens that a request drafts at a time (default {NUM_DRAFTS})",
    )
    parser.add_argument("--exit-layer", type=int, metavar="N", help="default layer of mode fixed")


def _add_exits(parser: argparse.ArgumentParser) -> None:
    """Where and how tokens may exit."""
    parser.add_argument(
        "--exit-layers",
        type=_layers,
        metavar="N,N",
        help="layers where tokens may exit (default: those the checkpoint names)",
    )
    parser.add_argument(
        "--max-layers",
        type=int,
        metavar="N",
        help="load and serve the first N layers only, as `exitserve truncate` would write them",
    )
    parser.add_argument(
        "--eos-threshold",
        type=float,
        metavar="T",
        help="threshold for end-of-sequence tokens (default: half way between the request's and 1)",
    )
    parser.add_argument(
        "--exit-checks",
        choices=EXIT_CHECKS,
        help="paying: a request whose checks keep failing is checked less often (default); "
        "all: every token is checked at every exit layer",
    )


def _threshold(text: str) -> float | str:
    try:
        return text if text == AUTO else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number, for example 0.8, nor {AUTO}"
        ) from error


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of layers; write for example 4,8"
        ) from error


def serve(args: argparse.Namespace) -> int:
    """Runs the server until it is stopped.

    Raises:
        ExitServeError: the checkpoint or an option does not fit, before anything slow starts.
    """
    ours = engine_options(
        args.model,
        {
            "max_layers": args.max_layers,
            "exit_layers": args.exit_layers,
            "mode": args.mode,
            "exit_threshold": args.exit_threshold,
            "exit_layer": args.exit_layer,
            "num_drafts": args.num_drafts,
            "eos_threshold": args.eos_threshold,
            "exit_checks": args.exit_checks,
        },
    )
    rules = check_rules(args.model, ours["additional_config"][KEY])
    if warning := doubt(read_config(args.model), rules.num_layers):
        print(f"exitserve: {warning}", file=sys.stderr)
    if rules.exit_layers:
        refuse_checkpoint(read_config(args.model))
    prepare_environment()
    ours = suit_runner(ours)
    check_rules(args.model, ours["additional_config"][KEY])
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    vllm_args = parse_vllm_args(args.model, args.rest)
    check_shadow_rate(args.shadow_rate, rules, vllm_args)
    vllm_args.shadow_rate = args.shadow_rate
    refuse(vllm_args, has_exits=bool(rules.exit_layers))
    add_engine_options(vllm_args, ours)
    try:
        uvloop.run(run_server(vllm_args))
    except ValueError as error:  # flags that vLLM finds not to fit the model, before it loads it
        message = " ".join(str(error).split())
        raise ExitServeError(f"vLLM cannot serve this: {message}") from error
    return 0


def parse_vllm_args(model: str, rest: list[str]) -> Any:
    """Parses and checks the flags that are vLLM's.

    Raises:
        ExitServeError: a flag is unknown or has a bad value, in one line; vLLM's own parser would
            print all of its three hundred flags before that.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()  # type: ignore[no-untyped-call]  # vLLM's
    base: Any = FlexibleArgumentParser  # untyped in vLLM

    class Parser(base):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ExitServeError(_parse_error(message, self._option_string_actions))

    parser = make_arg_parser(Parser(prog="exitserve serve"))
    vllm_args = parser.parse_args([model, *rest])
    vllm_args.model = model
    try:
        validate_parsed_serve_args(vllm_args)
    except (TypeError, ValueError) as error:
        raise ExitServeError(str(error).removeprefix("Error: ")) from error
    return vllm_args


def _parse_error(message: str, flags: Iterable[str]) -> str:
    if not message.startswith("unrecognized arguments: "):
        return f"{' '.join(message.split())}; see `vllm serve --help=all`."
    flag = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
    if flag == "--task":
        return (
            "--task is no flag any more, and pooling, embeddings, scores and classification are "
            "not supported; drop it to generate text."
        )
    return f"unknown flag {flag}.{nearest(flag, flags)} All flags: `vllm serve --help=all`."


def add_engine_options(vllm_args: Any, ours: dict[str, Any]) -> None:
    """Merges our engine options into vLLM's parsed arguments.

    Raises:
        ExitServeError: the user set an option that ours needs.
    """
    for name in ("worker_extension_cls", "scheduler_cls"):
        if getattr(vllm_args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ExitServeError(f"{flag} is set by exitserve itself; drop it.")
        setattr(vllm_args, name, ours[name])
    if "speculative_config" in ours:
        if vllm_args.logits_processors:
            raise ExitServeError(
                "--logits-processors does not go with --mode verify: vLLM would not apply them "
                "to drafts. Drop one of them."
            )
        vllm_args.speculative_config = ours["speculative_config"]
    if "compilation_config" in ours:
        from vllm.config.compilation import CUDAGraphMode

        mode = CUDAGraphMode[ours["compilation_config"]["cudagraph_mode"]]
        if vllm_args.compilation_config.cudagraph_mode is None:
            vllm_args.compilation_config.cudagraph_mode = mode
    vllm_args.hf_overrides = {**(vllm_args.hf_overrides or {}), **ours["hf_overrides"]}
    vllm_args.logits_processors = [
        *(vllm_args.logits_processors or []),
        *ours["logits_processors"],
    ]
    vllm_args.additional_config = {
        **(vllm_args.additional_config or {}),
        **ours["additional_config"],
    }
