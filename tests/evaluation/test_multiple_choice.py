"""Multiple choice at a depth, as docs/eval.md does it: lm-eval's own route to a truncated model."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.scores import read_exits
from exitserve.cli import main
from exitserve.reference import load_reference

DEPTH = 12
TASK = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {0}/rows.jsonl}}, cache_dir: {0}/cache}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: right
"""


def sums() -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(2, 6) for b in range(2, 6)]
    return [
        {"question": f"{a} + {b} =", "choices": [f"{a - b}", f"{a + b}", "eleven"], "right": 1}
        for a, b in pairs
    ]


def test_lm_eval_scores_a_cut_model_as_the_exit_at_its_depth(bundled: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    rows, cut = sums(), tmp_path / "cut"
    assert main(["truncate", str(bundled), "--layers", str(DEPTH), "--out", str(cut)]) == 0
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(TASK.format(tmp_path), encoding="utf-8")
    # What its command does, but for the 13,000 tasks of its own that it reads first.
    manager = import_module("lm_eval.tasks").TaskManager
    tasks = manager(include_path=str(tmp_path), include_defaults=False)
    weights, device = f"pretrained={cut},dtype=float32", "cpu"
    found = lm_eval.simple_evaluate("hf", weights, ["choice"], device=device, task_manager=tasks)
    reference, tokenizer = load_reference(bundled), AutoTokenizer.from_pretrained(bundled)
    for row, sample in zip(rows, found["samples"]["choice"], strict=True):
        # The prompt gives a request's first token, which no exit says: one less.
        prompt = len(tokenizer(row["question"])["input_ids"]) - 1
        likelihoods = []
        for choice in row["choices"]:
            ids = tuple(tokenizer(f"{row['question']} {choice}")["input_ids"])
            nats = read_exits(reference, Piece(ids, prompt, "text")).nats[DEPTH]
            likelihoods.append(-float(nats.sum()))
        # The same float32 sums of at most some dozen tokens, in batches that are padded.
        said = [likelihood for likelihood, _is_greedy in sample["filtered_resps"]]
        assert said == pytest.approx(likelihoods, abs=1e-3)
        assert sample["acc"] == (likelihoods.index(max(likelihoods)) == row["right"])
