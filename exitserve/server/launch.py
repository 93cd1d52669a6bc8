"""`exitserve serve`: vLLM's own API server, started with our parts."""

from __future__ import annotations

import argparse
from typing import Any

from exitserve.engine.launch import engine_options, prepare_environment
from exitserve.errors import ExitServeError

DESCRIPTION = """\
Serve a multi-exit checkpoint on vLLM's OpenAI-compatible server.

Every flag of `vllm serve` may follow; a few that matter here:
  --port 8000   --max-model-len 4096   --dtype float32   --enforce-eager

Requests choose their own exits in vllm_xargs:
  {"exit_threshold": 0.8}   exit where the confidence is above 0.8 (1: full depth)
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
    parser.add_argument(
        "--exit-threshold",
        type=float,
        metavar="T",
        help="default confidence threshold (default: requests that ask for none run full depth)",
    )
    parser.add_argument(
        "--mode",
        choices=["off", "confidence", "fixed"],
        help="default mode (default: what the other options imply)",
    )
    parser.add_argument("--exit-layer", type=int, metavar="N", help="default layer of mode fixed")
    parser.add_argument(
        "--exit-layers",
        type=_layers,
        metavar="N,N",
        help="layers where tokens may exit (default: those the checkpoint names)",
    )
    parser.add_argument(
        "--eos-threshold",
        type=float,
        metavar="T",
        help="threshold for end-of-sequence tokens (default: half way between the request's and 1)",
    )
    parser.set_defaults(run=serve, takes_rest=True)


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
            "exit_layers": args.exit_layers,
            "mode": args.mode,
            "exit_threshold": args.exit_threshold,
            "exit_layer": args.exit_layer,
            "eos_threshold": args.eos_threshold,
        },
    )
    prepare_environment()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()  # type: ignore[no-untyped-call]  # vLLM's
    new_parser: Any = FlexibleArgumentParser  # untyped in vLLM
    parser = make_arg_parser(new_parser(prog="exitserve serve"))
    vllm_args = parser.parse_args([args.model, *args.rest])
    vllm_args.model = args.model
    add_engine_options(vllm_args, ours)
    validate_parsed_serve_args(vllm_args)
    uvloop.run(run_server(vllm_args))
    return 0


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
    if (getattr(vllm_args, "api_server_count", None) or 1) > 1:
        raise ExitServeError("--api-server-count above 1 is not supported; use 1.")
    vllm_args.hf_overrides = {**(vllm_args.hf_overrides or {}), **ours["hf_overrides"]}
    vllm_args.logits_processors = [
        *(vllm_args.logits_processors or []),
        *ours["logits_processors"],
    ]
    vllm_args.additional_config = {
        **(vllm_args.additional_config or {}),
        **ours["additional_config"],
    }
