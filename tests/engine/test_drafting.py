"""Several tokens a step: full depth's tokens in mode "verify", the oracle's in "defer", whoever
shares the batch. On runner V1 here, and on V2 in `runner_v2`."""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.mark.parametrize(("kind", "every"), [("verify", 2), ("defer", 0), (None, 2)])
def test_the_oracles_tokens_and_depths(
    kind, every: int, model, start, random_jobs, asking, expected, drafting
) -> None:
    """In one batch, and with requests that arrive while others run; prompts in several chunks."""
    harness = start(model, **drafting)
    jobs = asking(random_jobs(8, longest=90, max_tokens=20), kind)

    assert harness.run(jobs, every=every) == expected(model, jobs)

    stats = harness.stats()
    assert stats["drafted_tokens"] > stats["accepted_tokens"] > 0
    exited = stats["tokens_by_depth"][2]
    assert exited == 0 if kind == "verify" else exited > 0
    assert sum(stats["tokens_by_depth"].values()) == sum(one.max_tokens for one in jobs)


def test_where_drafts_come_from(model, start, job, asking, expected, drafting) -> None:
    """A request's choice changes who drafts, and no token; what the model repeats is its text's."""
    harness = start(model, **drafting)
    jobs = asking([job([5 + i, 9, 5 + i, 9, 5 + i], {}, 60) for i in range(3)], "verify")
    right = expected(model, jobs)
    before = (0, 0, 0)
    found = {}
    for source in ("both", "text", "layers"):
        own = [replace(one, fields=one.fields | {"exit_drafts": source}) for one in jobs]
        assert harness.run(own) == right
        stats = harness.stats()
        names = ("drafted_tokens", "drafted_from_text", "accepted_from_text")
        after = tuple(stats[name] for name in names)
        found[source] = [now - then for now, then in zip(after, before, strict=True)]
        before = after
    drafted, of_text, accepted = zip(*found.values(), strict=True)
    assert drafted[0] > of_text[0] > accepted[0] > 0
    assert of_text[1] > accepted[1] > 0
    assert drafted[2] > of_text[2] == 0


def test_under_preemption(
    model, start, random_jobs, asking, expected, drafting, few_blocks
) -> None:
    """Tokens that are computed again, after a preemption, are what they were."""
    harness = start(model, **drafting | few_blocks | {"num_gpu_blocks_override": 10})
    jobs = asking(random_jobs(6, longest=60, max_tokens=40))

    assert harness.run(jobs) == expected(model, jobs)
    assert harness.counter("vllm:num_preemptions") > 0


def test_prefix_hits(model, start, job, asking, expected, drafting) -> None:
    """All keys and values are full depth's, so requests of any mode share blocks."""
    harness = start(model, **drafting | {"enable_prefix_caching": True})
    prompt = [2 + 7 * index % 120 for index in range(70)]
    for one in asking([job(prompt, {}, 16)] * 4):
        assert harness.run([one]) == expected(model, [one])


def test_a_context_that_is_full(model, start, job, asking, expected, drafting) -> None:
    """Drafts may not go past the longest context, up to which requests generate."""
    harness = start(model, **drafting)
    jobs = asking([job([5 + i, 9, 40], {}, 128 - 3) for i in range(2)])

    assert harness.run(jobs) == expected(model, jobs)


def test_the_whole_head_is_read_for_those_that_need_it(
    model, start, random_jobs, asking, expected, drafting
) -> None:
    """Sampled requests, and those with log-probabilities: their final tokens are the whole
    head's."""
    plain = asking(random_jobs(6, longest=30, max_tokens=20))
    more = [{"temperature": 1e-3, "seed": 1}, {"logprobs": 2}, {}]
    jobs = [replace(one, sampling=more[index % 3]) for index, one in enumerate(plain)]
    assert expected(model, jobs) != expected(model, plain)
    assert start(model, **drafting).run(jobs) == expected(model, jobs)


def test_fewer_rows_draft_less_and_lose_nothing(
    model, start, random_jobs, asking, expected, drafting
) -> None:
    """Of half of the tokens: fewer drafts are accepted, and full depth's answers are the same."""
    jobs = asking(random_jobs(6, longest=30, max_tokens=20), "verify")
    accepted = []
    for rows in ("all", "frequent"):
        own = drafting | {"exits": drafting["exits"] | {"exit_rows": rows}}
        harness = start(model, **own)
        assert harness.run(jobs) == expected(model, jobs)
        accepted.append(harness.stats()["accepted_tokens"])
    assert 0 < accepted[1] < accepted[0]


def test_drafts_by_the_size_of_the_batch(
    model, start, random_jobs, asking, expected, drafting
) -> None:
    """Three for up to two requests, one for up to five, none beyond: the answers stay."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 8, 0]]}
    harness = start(model, **drafting, speculative_config=schedule)
    jobs = asking(random_jobs(8, longest=40, max_tokens=20))
    assert harness.run(jobs, every=4) == expected(model, jobs)
    stats = harness.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_beside_an_engine_that_does_not_draft(model, start, random_jobs, asking, drafting) -> None:
    """Both in one process, started in either order."""
    skipping = drafting | {"exits": {"exit_layers": [2]}}
    jobs = asking(random_jobs(2, longest=10, max_tokens=4), "off")
    first = start(model, **skipping).run(jobs)
    assert start(model, **drafting).run(jobs) == first
