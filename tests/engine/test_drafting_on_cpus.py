"""Several tokens a step on runner V1: what vLLM's host leaves to us."""

from dataclasses import replace
from typing import Any

import pytest


def test_seeds_are_plain_vllms(model, start, start_plain, drafting) -> None:
    """Alone, among requests that draft, and with a prompt in chunks: a seed's numbers are not used
    up by drafts, since its request has none."""
    from vllm import SamplingParams

    seeded = [SamplingParams(temperature=0.8, seed=7 + i, max_tokens=16) for i in range(3)]
    greedy = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    lengths = (3, 90, 20)
    prompts = [
        {"prompt_token_ids": [2 + (5 + i) * j % 120 for j in range(n)]}
        for i, n in enumerate(lengths)
    ]

    def answers(engine: Any, asked: list[Any], given: list[Any]) -> list[Any]:
        return [one.outputs[0].token_ids for one in engine.generate(given, asked, use_tqdm=False)]

    harness = start(model, **drafting)
    alone = [
        answers(harness.engine, [one], [own])[0] for one, own in zip(seeded, prompts, strict=True)
    ]
    together = answers(harness.engine, [*seeded, *greedy], [*prompts, *prompts])[:3]
    assert together == alone
    plain = {name: value for name, value in drafting.items() if name != "exits"}
    assert harness.stats()["accepted_tokens"] > 0
    # A prompt in chunks stops plain vLLM's engine on a CPU (`exitserve.engine.compat.seeds`).
    engine = start_plain(model, **plain)
    assert answers(engine, seeded[::2], prompts[::2]) == alone[::2]


@pytest.mark.parametrize("kind", ["verify", "defer"])
def test_no_drafts_change_nothing(
    kind: str, model, start, random_jobs, asking, expected, drafting
) -> None:
    """Where the table says none, the pass checks its exit layer all the same."""
    none = {"num_speculative_tokens_per_batch_size": [[1, 8, 0]]}
    harness = start(model, **drafting, speculative_config=none)
    jobs = asking(random_jobs(6, longest=40, max_tokens=20), kind)
    layers = [replace(one, fields=one.fields | {"exit_drafts": "layers"}) for one in jobs]
    assert harness.run(layers, every=3) == expected(model, jobs)
    stats = harness.stats()
    assert stats["drafted_tokens"] == 0
    assert stats["checks"][2] == (0 if kind == "verify" else 6 * 19)


def test_nobody_drafts_for_who_asked_for_full_depth(
    model, start, random_jobs, asking, expected, drafting
) -> None:
    harness = start(model, **drafting)
    jobs = asking(random_jobs(2, longest=20, max_tokens=12), "off")
    assert harness.run(jobs) == expected(model, jobs)
    assert harness.stats()["drafted_tokens"] == 0


def test_chosen_tokens_have_no_logprobs(model, start, drafting) -> None:
    """Where another request of the batch wants log-probabilities, vLLM's engine would stop."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    asked = SamplingParams(max_tokens=2, logprob_token_ids=[3, 5])
    with pytest.raises(VLLMValidationError, match="logprob_token_ids is not supported"):
        start(model, **drafting).engine.generate([{"prompt_token_ids": [5, 6]}], asked)
