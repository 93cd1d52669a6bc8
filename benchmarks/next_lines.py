"""A generative task of code from a HumanEval file: given a solution up to a line, write that line.

    python benchmarks/next_lines.py models/exit-py-10m --human-eval HumanEval.jsonl.gz \
        --thresholds 0.3,0.5,0.7 --modes confidence,defer --out runs/next-lines

Writing whole functions is beyond a model of 10M parameters, but the next line of a solution that
stands there up to it is not. Makes the task's files in a temporary folder and runs `exitserve eval`
on them, with the solutions as the held-out text; options it does not know are handed on. The data
(MIT licence, github.com/openai/human-eval) is read from where you have it and is not part of this
repository.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exitserve.cli import main as exitserve

LINES = 4
"""Most lines asked for of one solution: the last ones, which have most before them."""
TASK = """\
task: next_lines
dataset_path: json
dataset_kwargs:
  data_files:
    test: next_lines.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{line}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 32
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def next_lines(prompt: str, solution: str) -> Iterator[dict[str, str]]:
    """Each of the last lines of a solution as a question, indentation and all.

    A prompt ends with a line: tokenizers that keep a word with the blank before it would never have
    seen one that ends within the indentation.
    """
    lines = solution.rstrip("\n").split("\n")
    for index in range(max(0, len(lines) - LINES), len(lines)):
        if lines[index].strip():
            before = "".join(f"{line}\n" for line in lines[:index])
            yield {"prompt": prompt + before, "line": lines[index].rstrip()}


def write_task(human_eval: Path, folder: Path) -> Path:
    """Writes the task's files; returns the file of the held-out text."""
    with gzip.open(human_eval, "rt", encoding="utf-8") as stream:
        problems = [json.loads(line) for line in stream]
    rows = [
        row
        for problem in problems
        for row in next_lines(problem["prompt"], problem["canonical_solution"])
    ]
    texts = [{"text": problem["prompt"] + problem["canonical_solution"]} for problem in problems]
    (folder / "next_lines.yaml").write_text(TASK, encoding="utf-8")
    for name, content in (("next_lines", rows), ("solutions", texts)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder / "solutions.jsonl"


def main() -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--human-eval", type=Path, required=True, help="HumanEval.jsonl.gz")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="next-lines-") as folder:
        text = write_task(args.human_eval, Path(folder))
        tasks = ["--tasks", "next_lines", "--task-path", folder]
        return exitserve(["eval", args.model, "--data", str(text), *tasks, *rest])


if __name__ == "__main__":
    sys.exit(main())
