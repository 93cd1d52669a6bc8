"""Several tokens a step: every architecture, and two ranks."""

import pytest

from exitserve.engine.hooks.plugin import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(
    architecture: str, make_family, start, random_jobs, asking, expected, drafting
) -> None:
    """Past attention windows of 32, half of the rows in mode "defer"."""
    model = make_family(architecture, exits=(2,))
    jobs = asking(random_jobs(4, longest=30, max_tokens=24))
    harness = start(model, **drafting)

    assert harness.run(jobs) == expected(model, jobs)
    assert harness.stats()["tokens_by_depth"][2] > 0


@pytest.mark.nightly
def test_tensor_parallel(
    model, start, random_jobs, asking, expected, drafting, monkeypatch
) -> None:
    """Each rank drafts, and decides which tokens are final, with its slice of the vocabulary."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    jobs = asking(random_jobs(4, longest=30, max_tokens=12))
    harness = start(model, **drafting, tensor_parallel_size=2)

    assert harness.run(jobs) == expected(model, jobs)
