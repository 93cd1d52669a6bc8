"""The `exitserve` command: parse, call, exit code.

Imports nothing heavy, so that `--help` answers at once; each command imports what it needs.
"""

import argparse
import os
import select
import sys
from importlib.metadata import entry_points
from typing import Any

from exitserve import __version__
from exitserve.bench.command import add_command as add_bench
from exitserve.calibration.command import add_calibrate
from exitserve.demo import add_demo
from exitserve.errors import ExitServeError
from exitserve.evaluation.command import add_command as add_eval
from exitserve.import_checkpoint import add_import
from exitserve.planning.command import add_command as add_plan
from exitserve.server.command import add_serve, with_config
from exitserve.truncation.command import add_truncate

DESCRIPTION = """\
Decoders that stop early: train with one aligned loss, serve on vLLM, each token at its own depth.

A first tour:
  exitserve demo                                   all of it on the bundled model
  exitserve serve MODEL --exit-threshold 0.8       an OpenAI-compatible server
  exitserve plan MODEL                             what exits can give, before any training
  exitserve bench MODEL --out DIR                  side by side with plain vLLM
  exitserve calibrate MODEL --data FILE            thresholds that keep a target, guaranteed
  exitserve eval MODEL --data FILE --out DIR       quality against depth; why tokens stop
  exitserve train RECIPE.yaml                      make a multi-exit model
  exitserve truncate MODEL --layers 8 --out DIR    its first layers as a smaller checkpoint
  exitserve import MODEL --exit-layers 4,8 --out DIR   a copy that names exits trained elsewhere
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; other packages add commands through `exitserve.commands`."""
    parser = argparse.ArgumentParser(
        prog="exitserve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"exitserve {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (add_serve, add_plan, add_bench, add_calibrate, add_eval, add_truncate, add_import):
        add(subparsers)
    add_demo(subparsers, run_command=main)
    for entry in sorted(entry_points(group="exitserve.commands"), key=lambda entry: entry.name):
        entry.load()(subparsers)
    return parser


def main(argv: list[str] | None = None, **research: Any) -> int:
    """Runs one command; see `run`."""
    return run(build_parser(), argv, **research)


_UNREAD = 128 + 13
"""Exit code where nobody reads the output any longer, as a shell tells SIGPIPE."""


def run(parser: argparse.ArgumentParser, argv: list[str] | None = None, **research: Any) -> int:
    """Parses and runs; returns 2 and writes one line to standard error for a user's mistake.

    Ends without a word where the output goes to `head` or the like, which has ended.

    Args:
        parser: sets `run`.
        argv: the arguments; by default the process's.
        research: options that have no flag, by name: `RESEARCH` of a command has them.
    """
    try:
        try:
            return _run(parser, sys.argv[1:] if argv is None else argv, research)
        finally:
            if sys.stdout is not None:  # as it is behind `>&-`
                sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, select.POLLOUT)
        if not any(event & select.POLLERR for _, event in output.poll(0)):
            raise  # the pipe was another one
        # What is left goes nowhere: Python would fail to write it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD


def _run(parser: argparse.ArgumentParser, argv: list[str], research: dict[str, Any]) -> int:
    try:
        if argv[:1] == ["serve"]:
            argv = ["serve", *with_config(argv[1:])]
        args, rest = parser.parse_known_args(argv)
        if rest and not getattr(args, "takes_rest", False):
            parser.error(f"unrecognised arguments: {' '.join(rest)}")
        assert research.keys() <= vars(args).keys(), research
        args = argparse.Namespace(**{**vars(args), **research, "rest": rest})
        return int(args.run(args))
    except ExitServeError as error:
        print(f"exitserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
