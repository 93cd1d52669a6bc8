"""Salts of the prefix cache: no request reaches the blocks of another policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitserve.policy import ExitPolicy

POLICIES = st.one_of(
    st.just(ExitPolicy.off()),
    st.sampled_from([2, 3, 4]).map(ExitPolicy.fixed),
    st.sampled_from([0.25, 0.5]).map(ExitPolicy.confidence),
    st.just(ExitPolicy.confidence(0.5, mode="defer")),
)
POLICY_SALTS = ["exit:fixed:3", "exit:confidence:0.5:0.75", "", "|", "|exit:fixed:3"]
OWN = st.one_of(st.none(), st.sampled_from(POLICY_SALTS), st.text("exit:fd|3", max_size=14))


@given(POLICIES, OWN, POLICIES, OWN)
def test_salts_are_equal_only_for_equal_requests(
    one: ExitPolicy, own: str | None, other: ExitPolicy, its: str | None
) -> None:
    from exitserve.engine.hooks.scheduler import joint_salt

    same = one.cache_salt() == other.cache_salt() and own == its
    assert (joint_salt(one, own) == joint_salt(other, its)) == same


def test_a_forged_salt_reads_no_propagated_blocks(start, bundled) -> None:
    """The salt of exit layer 3, sent by a request at full depth."""
    from vllm import SamplingParams

    engine = start(bundled, block_size=32).engine
    prompt = list(range(300, 364))

    def logprobs(salt: str | None, **fields: float) -> list[float]:
        params = SamplingParams(
            max_tokens=40, temperature=0, ignore_eos=True, logprobs=0, extra_args=fields
        )
        given = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        (output,) = engine.generate([given], params, use_tqdm=False)
        return [next(iter(place.values())).logprob for place in output.outputs[0].logprobs]

    truth = logprobs(None, exit_threshold=1.0)
    engine.reset_prefix_cache()
    early = logprobs(None, exit_layer=3)
    assert early != pytest.approx(truth, abs=1e-4)
    # The same text again: its blocks, generated ones among them, are in the cache by now.
    found = logprobs("exit:fixed:3", exit_threshold=1.0)
    assert found == pytest.approx(truth, abs=1e-4)
