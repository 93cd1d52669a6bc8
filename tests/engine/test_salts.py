"""Salts of the prefix cache: no request reaches the blocks of another policy."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exitserve.policy import ExitPolicy

POLICIES = st.one_of(
    st.just(ExitPolicy.off()),
    st.sampled_from([2, 3, 4]).map(ExitPolicy.fixed),
    st.sampled_from([0.25, 0.5]).map(ExitPolicy.confidence),
    st.just(ExitPolicy.confidence(0.5, mode="defer")),
)
EARLY = ExitPolicy.fixed(3)
FORGED = str(EARLY.cache_salt())
POLICY_SALTS = [FORGED, str(ExitPolicy.confidence(0.5).cache_salt()), "", "|", f"|{FORGED}"]
OWN = st.one_of(st.none(), st.sampled_from(POLICY_SALTS), st.text("exit:fd|3", max_size=14))


@given(POLICIES, OWN, POLICIES, OWN)
@example(ExitPolicy.off(), FORGED, EARLY, None)
@example(ExitPolicy.off(), f"{FORGED}|mine", EARLY, "mine")
def test_salts_are_equal_only_for_equal_requests(
    one: ExitPolicy, own: str | None, other: ExitPolicy, its: str | None
) -> None:
    from exitserve.engine.hooks.scheduler import joint_salt

    same = one.cache_salt() == other.cache_salt() and own == its
    assert (joint_salt(one, own) == joint_salt(other, its)) == same


def test_a_forged_salt_reads_no_propagated_blocks(start, bundled) -> None:
    """The salt of exit layer 6, sent by a request at full depth."""
    from vllm import SamplingParams

    engine = start(bundled, block_size=32).engine

    def ask(prompt: list[int], salt: str | None = None, **fields: float) -> list[tuple[int, float]]:
        params = SamplingParams(
            max_tokens=40, temperature=0, ignore_eos=True, logprobs=0, extra_args=fields
        )
        given = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        (output,) = engine.generate([given], params, use_tqdm=False)
        (one,) = output.outputs
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        return [(token, place[token].logprob) for token, place in pairs]

    prompt = list(range(300, 364))
    early = ask(prompt, exit_layer=6)
    # The blocks of what it generated are in the cache by now.
    text = prompt + [token for token, _ in early]
    forged = ask(text, FORGED, exit_threshold=1.0)
    engine.reset_prefix_cache()
    truth = ask(text, exit_threshold=1.0)
    for (token, logprob), (its, true) in zip(forged, truth, strict=True):
        assert token == its
        assert logprob == pytest.approx(true, abs=1e-4)  # float32 sums in another order
