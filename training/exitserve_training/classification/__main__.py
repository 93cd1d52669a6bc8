"""Runs a classifier with early exit."""

import sys

from exitserve.cli import run
from exitserve_training.classification.command import build_parser

if __name__ == "__main__":
    sys.exit(run(build_parser()))
