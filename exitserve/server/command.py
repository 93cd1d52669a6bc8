"""The `serve` command: starts vLLM's API server with exitserve's engine, routes and metrics."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from exitserve.arguments import (
    add_model_command,
    exit_layers_of,
    show_verdict,
    threshold_or_auto,
    with_adapter,
)
from exitserve.checkpoint.block import read_config
from exitserve.checkpoint.calibration import EXIT_ROWS
from exitserve.engine.launch import (
    DIED,
    check_rules,
    engine_options,
    executor_options,
    prepare_environment,
    suit_runner,
)
from exitserve.engine.options import KEY, OPTIONS
from exitserve.errors import ExitServeError, nearest, one_line
from exitserve.policy import MODES, NUM_DRAFTS
from exitserve.server.engine_end import EngineEnd
from exitserve.server.unsupported_features import (
    check_same_config,
    check_shadow_rate,
    reject_parallel_experts,
    reject_unsupported,
    reject_unsupported_quantisation,
    transfers_kv,
)

DESCRIPTION = """\
Serve a multi-exit checkpoint on vLLM's OpenAI-compatible server.

All flags of `vllm serve` work too, for example:
  --port 8000   --max-model-len 4096   --dtype float32   --enforce-eager

Requests choose their exits in vllm_xargs:
  {"exit_threshold": 0.8}   exit where the confidence is above 0.8 (1: full depth)
  {"exit_target": 0.98}     exit at calibrated thresholds that keep 98 % of full depth's tokens
  {"exit_mode": "off"}      full depth
  {"exit_layer": 6}         exit at layer 6, every token
  {"exit_trace": true}      return the depth of each token
"""


def add_serve(subparsers: Any) -> None:
    """Adds the `serve` command."""
    parser = add_model_command(
        subparsers,
        "serve",
        serve,
        help="serve a model on vLLM, each token at its own depth",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    _add_default(parser)
    _add_exits(parser)
    parser.add_argument(
        "--shadow-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="share of requests whose answers are compared with full depth afterwards, for the "
        "metrics of live quality: 0.01 is one in a hundred (default 0: none)",
    )
    parser.add_argument(
        "--playground",
        action="store_true",
        help="also serve a page to try the model: /exitserve/playground",
    )
    parser.set_defaults(takes_rest=True)


def _add_default(parser: argparse.ArgumentParser) -> None:
    """Options for requests that set no exit fields."""
    parser.add_argument(
        "--exit-threshold",
        type=threshold_or_auto,
        metavar="T",
        help="default confidence threshold, or auto: the thresholds that exitserve calibrate found "
        "(default: auto if there are any, else full depth)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="default mode (default: what the other options imply). confidence: tokens exit early, "
        "and their deeper keys and values are approximated; verify: the first layers draft and "
        "full depth judges, so answers are full depth's; defer: the same, but drafts above the "
        "threshold are final",
    )
    parser.add_argument(
        "--num-drafts",
        type=int,
        metavar="N",
        help=f"modes verify and defer: most tokens drafted at a time (default {NUM_DRAFTS})",
    )
    parser.add_argument("--exit-layer", type=int, metavar="N", help="default layer of mode fixed")


def _add_exits(parser: argparse.ArgumentParser) -> None:
    """Where and how tokens may exit."""
    parser.add_argument(
        "--exit-layers",
        type=exit_layers_of,
        metavar="N,N",
        help="layers where tokens may exit (default: the checkpoint's)",
    )
    parser.add_argument(
        "--eos-threshold",
        type=float,
        metavar="T",
        help="threshold for end-of-sequence tokens (default: half way between the request's and 1)",
    )
    parser.add_argument(
        "--exit-rows",
        choices=EXIT_ROWS,
        help="rows of the LM head that checks and drafts read, where calibration found exit rows: "
        "those of frequent tokens (default), or all",
    )
    parser.add_argument(
        "--exits-up-to",
        type=int,
        metavar="N",
        help="requests that begin while more than N run, themselves included, run at full depth; "
        "then answers depend on the load (default: they do not)",
    )


# Before the message of pydantic's error about vLLM's options, and behind it.
_AROUND_REASONS = re.compile(r"^1 validation error for \w+ (Value error, )?| \[type=.*")
MAY_LOSE = (
    "exitserve: tokens exit as requests ask, also where many requests run together and full depth "
    "would be faster; `exitserve plan` tells where that is."
)


def serve(args: argparse.Namespace) -> int:
    """Runs the server until it is stopped, or its engine fails: then the exit code is 1.

    Raises:
        ExitServeError: the checkpoint or an option cannot be served; raised before anything slow.
    """
    name, args = args.model, with_adapter(args)
    ours = engine_options(
        args.model, {name: getattr(args, name) for name in OPTIONS}, args.revision
    )
    config = read_config(args.model, args.revision)
    show_verdict(config)
    rules = check_rules(args.model, ours["additional_config"][KEY], args.revision)
    prepare_environment()
    ours = suit_runner(ours, args.model, args.revision)
    if rules.exit_layers and not rules.num_drafts:
        reject_unsupported_quantisation(config)
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from exitserve.engine.compat.starting import stop_while_starting

    revision = [] if args.revision is None else ["--revision", args.revision]
    vllm_args = parse_vllm_args(args.model, [*args.rest, *revision])
    if args.adapter is not None:
        vllm_args.served_model_name = vllm_args.served_model_name or [name]
    check_same_config(vllm_args)
    served = ours["additional_config"][KEY]
    check_rules(args.model, served, args.revision, transfers=transfers_kv(vllm_args))
    if rules.exit_layers:
        reject_parallel_experts(config, vllm_args)
    check_shadow_rate(args.shadow_rate, rules, vllm_args)
    vllm_args.shadow_rate, vllm_args.playground = args.shadow_rate, args.playground
    vllm_args.engine_end = end = EngineEnd()
    reject_unsupported(vllm_args, has_exits=bool(rules.exit_layers), drafts=rules.num_drafts > 0)
    add_engine_options(vllm_args, ours)
    if rules.default.mode in ("confidence", "fixed"):
        print(MAY_LOSE, file=sys.stderr)
    stop_while_starting()
    try:
        # vLLM's own command: it starts as many engines and API processes as its flags say.
        ServeSubcommand.cmd(vllm_args)
    except KeyboardInterrupt:
        print("exitserve: stopped while it was starting.", file=sys.stderr)
        return 130
    except (OSError, OverflowError) as error:
        where = vllm_args.uds or f"{vllm_args.host or ''}:{vllm_args.port}"
        raise ExitServeError(f"vLLM cannot serve at {where}: {error}") from error
    except (KeyError, ValueError) as error:  # flags that vLLM rejects before loading the model
        if isinstance(error, KeyError) and "parser" not in str(error):
            raise
        message = _AROUND_REASONS.sub("", " ".join(str(error).split()))
        raise ExitServeError(f"vLLM cannot serve this: {message}") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in DIED):
            raise
        print(f"exitserve: {one_line(str(error))} The log above says how.", file=sys.stderr)
        return 1
    if end.failed:
        print("exitserve: the engine failed; the log above says how.", file=sys.stderr)
    return int(end.failed)


def with_config(arguments: Sequence[str]) -> list[str]:
    """The arguments of `serve` with those in the file of `--config FILE`, ours and vLLM's alike.

    As in `vllm serve`, MODEL may be in the file, the command line counts where both say something,
    and flags may have underscores.

    Raises:
        ExitServeError: there is no such file, or it holds something else.
    """
    given = [part for one in arguments for part in re.split("(?<=^--config)=", one)]
    if "--config" in given:
        at = given.index("--config")
        lists = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        lists.add_argument("--model", nargs=1, default=[])
        lists.add_argument("--exit-layers", "--exit_layers", nargs="+")
        file, found = lists.parse_known_args(_flags_in("".join(given[at + 1 : at + 2])))
        given[at : at + 2] = []
        if not given or given[0].startswith("-"):
            given[:0] = file.model
        if file.exit_layers:
            found += ["--exit-layers", ",".join(file.exit_layers)]
        given[1:1] = found
    return [re.sub("^--[^.=]*", lambda flag: flag[0].replace("_", "-"), one) for one in given]


def _flags_in(path: str) -> list[str]:
    """The flags and values in a file of `--config`."""
    prepare_environment()
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from yaml import YAMLError

    from exitserve.engine.compat.command_line import make_arg_parser

    base: Any = FlexibleArgumentParser  # untyped in vLLM
    try:
        found: list[str] = make_arg_parser(base()).load_config_file(path)
    except (AttributeError, OSError, ValueError, YAMLError) as error:
        raise ExitServeError(
            f"--config {path!r} must be a YAML file of flags: {one_line(str(error))}"
        ) from error
    return found


def parse_vllm_args(model: str, rest: list[str]) -> Any:
    """Parses and checks vLLM's flags.

    Raises:
        ExitServeError: a flag is unknown or has a bad value. The message has one line; vLLM's
            parser would print all of its three hundred flags first.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from exitserve.engine.compat.command_line import (
        cli_env_setup,
        make_arg_parser,
        validate_parsed_serve_args,
    )

    cli_env_setup()  # type: ignore[no-untyped-call, unused-ignore]  # vLLM's
    base: Any = FlexibleArgumentParser  # untyped in vLLM

    class Parser(base):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ExitServeError(_parse_error(message, self._option_string_actions))

    parser = make_arg_parser(Parser(prog="exitserve serve"))
    vllm_args = parser.parse_args([model, *rest])
    vllm_args.model = model
    try:
        validate_parsed_serve_args(vllm_args)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ExitServeError(str(error).removeprefix("Error: ")) from error
    return vllm_args


def _parse_error(message: str, flags: Iterable[str]) -> str:
    if not message.startswith("unrecognized arguments: "):
        return f"{' '.join(message.split())}; see `vllm serve --help=all`."
    flag = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
    if flag == "--task":
        return (
            "--task no longer exists, and pooling, embeddings, scores and classification are not "
            "supported; drop it to generate text."
        )
    return f"unknown flag {flag}.{nearest(flag, flags)} All flags: `vllm serve --help=all`."


def add_engine_options(vllm_args: Any, ours: dict[str, Any]) -> None:
    """Merges our engine options into vLLM's parsed arguments.

    Raises:
        ExitServeError: the user set an option that exitserve sets.
    """
    for name, value in executor_options(vars(vllm_args)).items():
        setattr(vllm_args, name, value)
    for name in ("worker_extension_cls", "scheduler_cls", "worker_cls"):
        if name not in ours:
            continue
        if getattr(vllm_args, name, None) not in (None, "", "auto"):
            flag = "--" + name.replace("_", "-")
            raise ExitServeError(f"{flag} is set by exitserve; drop it.")
        setattr(vllm_args, name, ours[name])
    if "speculative_config" in ours:
        if vllm_args.logits_processors:
            raise ExitServeError(
                "--logits-processors cannot go with drafts (--mode verify, --num-drafts): vLLM "
                "would not apply them to drafts. Drop one of them."
            )
        vllm_args.speculative_config = ours["speculative_config"]
    if "compilation_config" in ours:
        from vllm.config.compilation import CUDAGraphMode

        mode = CUDAGraphMode[ours["compilation_config"]["cudagraph_mode"]]
        if vllm_args.compilation_config.cudagraph_mode is None:
            vllm_args.compilation_config.cudagraph_mode = mode
    vllm_args.hf_overrides = {**(vllm_args.hf_overrides or {}), **ours["hf_overrides"]}
    vllm_args.logits_processors = [*(vllm_args.logits_processors or []), *ours["logits_processors"]]
    vllm_args.additional_config = {
        **(vllm_args.additional_config or {}),
        **ours["additional_config"],
    }
