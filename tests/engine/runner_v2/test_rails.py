"""Several tokens a step on runner V2: full depth's tokens in mode "verify", the oracle's in
"defer", whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LAYER = 2
"""Of 6: where the tiny checkpoints draft."""
DRAFTS = 3
OPTIONS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
VERIFY = {"mode": "verify", "exit_threshold": 0.1, "exit_layers": [LAYER], "num_drafts": DRAFTS}


def of(kind: str, jobs: list[Any], job: Any) -> list[Any]:
    """The jobs with fields that a server which drafts takes: of one kind, or all kinds in turn."""
    kinds = {
        "verify": {"exit_mode": "verify", "exit_threshold": 0.1},
        "defer": {"exit_mode": "defer", "exit_threshold": 0.08},
        "off": {"exit_mode": "off"},
        "daring": {"exit_mode": "defer", "exit_threshold": 0.04},
    }
    names = list(kinds) if kind == "mixed" else [kind]
    return [
        job(one.prompt, kinds[names[index % len(names)]], one.max_tokens)
        for index, one in enumerate(jobs)
    ]


@pytest.fixture(scope="module")
def model(make_checkpoint: Any) -> Any:
    """A model with one exit."""
    return make_checkpoint("llama", exits=(LAYER,))


@pytest.fixture(scope="module")
def expected(model: Any, expect: Any) -> Callable[[Any], Any]:
    """What the oracle says of a job: every check is made here."""
    from exitserve.reference import load_reference

    reference = load_reference(str(model), exit_checks="all")

    def expected(job: Any) -> Any:
        if job.fields["exit_mode"] in ("verify", "off"):
            job = type(job)(job.prompt, {}, job.max_tokens)
        return expect(reference, job)

    return expected


@pytest.mark.parametrize("kind", ["verify", "defer", "mixed"])
@pytest.mark.parametrize("every", [0, 2])
def test_the_oracles_tokens_and_depths(
    kind: str, every: int, model: Any, start: Any, random_jobs: Any, job: Any, expected: Any
) -> None:
    """In one batch, and with requests that arrive while others run; prompts in several chunks."""
    harness = start(model, exits=VERIFY, enable_prefix_caching=False, **OPTIONS)
    jobs = of(kind, random_jobs(8, longest=90, max_tokens=20), job)

    assert harness.run(jobs, every=every) == [expected(one) for one in jobs]

    stats = harness.stats()
    assert stats["drafted_tokens"] > stats["accepted_tokens"] > 0
    exited = stats["tokens_by_depth"][LAYER]
    assert exited == 0 if kind == "verify" else exited > 0
    assert sum(stats["tokens_by_depth"].values()) == sum(one.max_tokens for one in jobs)


def test_under_preemption(
    model: Any, start: Any, random_jobs: Any, job: Any, expected: Any, few_blocks: Any
) -> None:
    """Tokens that are computed again, after a preemption, are what they were."""
    options = {**OPTIONS, **few_blocks, "num_gpu_blocks_override": 10, "max_num_seqs": 8}
    harness = start(model, exits=VERIFY, **options)
    jobs = of("mixed", random_jobs(10, longest=60, max_tokens=40), job)

    assert harness.run(jobs) == [expected(one) for one in jobs]
    assert harness.counter("vllm:num_preemptions") > 0


def test_prefix_hits(model: Any, start: Any, job: Any, expected: Any) -> None:
    """All keys and values are full depth's, so requests of any mode share blocks."""
    harness = start(model, exits=VERIFY, enable_prefix_caching=True, **OPTIONS)
    prompt = [2 + 7 * index % 120 for index in range(70)]
    for one in of("mixed", [job(prompt, {}, 16)] * 4, job):
        assert harness.run([one]) == [expected(one)]


def test_a_context_that_is_full(model: Any, start: Any, job: Any, expected: Any) -> None:
    """Drafts may not go past the longest context, up to which requests generate."""
    harness = start(model, exits=VERIFY, enable_prefix_caching=False, **OPTIONS)
    jobs = of("mixed", [job([5 + i, 9, 40], {}, 128 - 3) for i in range(4)], job)

    assert harness.run(jobs) == [expected(one) for one in jobs]
