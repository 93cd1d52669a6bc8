"""Several tokens a step on runner V2: full depth's tokens in mode "verify", the oracle's in
"defer", whoever shares the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from exitserve.engine.hooks.plugin import ARCHITECTURES
from exitserve.reference import load_reference

LAYER = 2
"""Of 6: where the tiny checkpoints draft."""
DRAFTS = 3
SAMPLES = 400
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


def full_depth(job: Any) -> Any:
    """What the oracle is asked for a job: in mode "verify" full depth decides every token."""
    lossless = job.fields["exit_mode"] in ("verify", "off")
    return type(job)(job.prompt, {}, job.max_tokens) if lossless else job


@pytest.fixture(scope="module")
def model(make_checkpoint: Any) -> Any:
    """A model with one exit."""
    return make_checkpoint("llama", exits=(LAYER,))


@pytest.fixture(scope="module")
def expected(model: Any, expect: Any) -> Callable[[Any], Any]:
    """What the oracle says of a job: every check is made here."""
    reference = load_reference(str(model), exit_checks="all")

    return lambda job: expect(reference, full_depth(job))


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(
    architecture: str, make_family: Any, start: Any, expect: Any, random_jobs: Any, job: Any
) -> None:
    """Past attention windows of 32, half of the rows in mode "defer"."""
    model = make_family(architecture, exits=(LAYER,))
    reference = load_reference(str(model), exit_checks="all")
    jobs = of("mixed", random_jobs(4, longest=30, max_tokens=24), job)
    harness = start(model, exits=VERIFY, enable_prefix_caching=False, **OPTIONS)

    assert harness.run(jobs) == [expect(reference, full_depth(one)) for one in jobs]
    assert harness.stats()["tokens_by_depth"][LAYER] > 0


def test_tensor_parallel(
    model: Any, start: Any, random_jobs: Any, job: Any, expected: Any, monkeypatch: Any
) -> None:
    """Each rank drafts, and decides who stands, with its slice of the vocabulary."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    jobs = of("mixed", random_jobs(4, longest=30, max_tokens=12), job)
    harness = start(
        model, exits=VERIFY, tensor_parallel_size=2, enable_prefix_caching=False, **OPTIONS
    )

    assert harness.run(jobs) == [expected(one) for one in jobs]


def test_sampling_fields_are_vllms(model: Any, start: Any, start_plain: Any) -> None:
    """Greedy requests with all that vLLM may do to logits, in one batch: plain vLLM's tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.9, "frequency_penalty": 0.4},
        {"min_tokens": 10, "stop_token_ids": list(range(2, 60))},
        {"logprobs": 3},
        {"allowed_token_ids": list(range(40, 90))},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{30}")},
        {},
    ]
    asked = [SamplingParams(temperature=0, max_tokens=24, **one) for one in fields]
    prompts = [{"prompt_token_ids": [5 + i, 17, 90 - i]} for i in range(len(asked))]
    options = {**OPTIONS, "enable_prefix_caching": False}

    def answers(engine: Any) -> list[Any]:
        found = [one.outputs[0] for one in engine.generate(prompts, asked, use_tqdm=False)]
        return [(one.token_ids, one.finish_reason) for one in found]

    expected = answers(start_plain(model, **options))
    harness = start(model, exits=VERIFY, **options)
    assert answers(harness.engine) == expected
    assert harness.stats()["accepted_tokens"] > 0


def test_samples_have_full_depths_distribution(model: Any, start: Any, start_plain: Any) -> None:
    """Drafts are accepted or replaced so that each token is distributed as without drafts."""
    from scipy.stats import chi2_contingency
    from vllm import SamplingParams

    options = {**OPTIONS, "enable_prefix_caching": False}
    asked = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, n=SAMPLES)

    def counts(engine: Any) -> Counter[int]:
        (found,) = engine.generate({"prompt_token_ids": [7, 8, 9]}, asked, use_tqdm=False)
        return Counter(one.token_ids[-1] for one in found.outputs)

    plain = counts(start_plain(model, **options))
    drafted = counts(start(model, exits=VERIFY, **options).engine)
    often = [token for token in plain | drafted if plain[token] + drafted[token] >= 10]
    table = [[one[token] for token in often] for one in (plain, drafted)]
    # Equal distributions fail once in a thousand runs; seeds are fixed, so a run is a verdict.
    assert chi2_contingency(table).pvalue > 0.001
