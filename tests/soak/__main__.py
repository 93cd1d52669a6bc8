"""`python -m tests.soak --url URL`: soaks a server that runs already; exit code 1 if it failed."""

import argparse
import json
import sys
from pathlib import Path

from .bodies import MODES
from .soak import soak, summary


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Many clients of all kinds ask a server at once: every answer must be the one "
        "that the request gets alone, and nothing may be left afterwards. The server should "
        "compute in float32: in 16 bits, a batch of another size rounds another way.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="default %(default)s")
    parser.add_argument("--clients", type=int, default=16, help="default %(default)s")
    parser.add_argument(
        "--drawn-share",
        type=float,
        default=0.5,
        help="of the requests, whose bodies are drawn from the server's schema "
        "(default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--modes",
        default="default,off,confidence",
        help=f"that the server takes, of {','.join(MODES)} (default %(default)s; where the first "
        "layers draft: default,off,defer,verify)",
    )
    parser.add_argument("--pid", type=int, help="the server's, to see what it holds")
    parser.add_argument("--out", type=Path, help="file for the report, as JSON")
    args = parser.parse_args()
    report = soak(
        args.url,
        seconds=args.seconds,
        number=args.seed,
        clients=args.clients,
        drawn_share=args.drawn_share,
        modes=args.modes.split(","),
        pid=args.pid,
    )
    print(summary(report))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
