"""Looks into a checkpoint, layer by layer."""

import sys

from exitserve.cli import run
from exitserve_training.inspect.command import build_parser

if __name__ == "__main__":
    sys.exit(run(build_parser()))
