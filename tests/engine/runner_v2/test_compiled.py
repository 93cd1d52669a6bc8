"""Segments that are compiled, with the norm behind them, on runner V2; without graphs."""

from __future__ import annotations

import pytest
from vllm import __version__


@pytest.mark.nightly
def test_exits_that_the_device_decides(start, oracle, expect, make_checkpoint, random_jobs) -> None:
    model = make_checkpoint("llama")
    jobs = random_jobs(max_tokens=12)
    harness = start(model, exits={"exit_rows": "frequent"}, enforce_eager=False, max_num_seqs=8)
    reference = oracle(model)
    assert harness.run(jobs) == [expect(reference, one) for one in jobs]


@pytest.mark.skipif(
    not __version__.startswith("0.32."),
    reason="later ones warm up a top-k kernel that Triton's interpreter cannot run",
)
def test_drafts_and_their_judge(start, model, random_jobs, asking, expected, drafting) -> None:
    jobs = asking(random_jobs(count=4, max_tokens=12))
    harness = start(model, enforce_eager=False, **drafting)
    assert harness.run(jobs) == expected(model, jobs)
