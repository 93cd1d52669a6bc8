"""Several tokens a step: what vLLM does to logits, it does to those of drafts."""

from collections import Counter
from typing import Any

from scipy.stats import chi2_contingency

SAMPLES = 150


def test_greedy_requests_have_plain_vllms_tokens(model, start, start_plain, drafting) -> None:
    """Penalties, bans, grammars, log-probabilities and stops, in one batch."""
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

    def answers(engine: Any) -> list[Any]:
        found = [one.outputs[0] for one in engine.generate(prompts, asked, use_tqdm=False)]
        return [(one.token_ids, one.finish_reason) for one in found]

    plain = {name: value for name, value in drafting.items() if name != "exits"}
    expected = answers(start_plain(model, **plain))
    harness = start(model, **drafting)
    assert answers(harness.engine) == expected
    assert harness.stats()["accepted_tokens"] > 0


def test_samples_have_full_depths_distribution(model, start, start_plain, drafting) -> None:
    """Drafts are accepted or replaced so that each token is distributed as without drafts, and
    still are once another engine of the process has registered vLLM's kernels again."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True, n=SAMPLES)

    def counts(engine: Any) -> Counter[int]:
        (found,) = engine.generate({"prompt_token_ids": [7, 8, 9]}, asked, use_tqdm=False)
        return Counter(one.token_ids[-1] for one in found.outputs)

    plain = {name: value for name, value in drafting.items() if name != "exits"}
    drafting_engine = start(model, **drafting).engine
    undrafted = counts(start_plain(model, **plain))
    drafted = counts(drafting_engine)
    often = [token for token in undrafted | drafted if undrafted[token] + drafted[token] >= 10]
    table = [[one[token] for token in often] for one in (undrafted, drafted)]
    # Equal distributions fail once in a thousand runs; seeds are fixed, so a run is a verdict.
    assert chi2_contingency(table).pvalue > 0.001


def test_quantised_weights_draft_for_themselves(quantised, start, start_plain, drafting) -> None:
    """Drafts and their judge are passes of vLLM's own layers, whatever these are made of."""
    from vllm import SamplingParams

    options = drafting | {"dtype": "bfloat16"}  # some CPUs multiply 8 bits by no wider type
    exits = options.pop("exits") | {"exit_layers": [3]}
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = ["import os\nimport ", "for i in range(", "class A:\n    def __init__(", "x = 1\ny ="]

    def answers(engine: Any) -> list[Any]:
        found = engine.generate(prompts, asked, use_tqdm=False)
        return [one.outputs[0].token_ids for one in found]

    expected = answers(start_plain(quantised, **options))
    harness = start(quantised, exits=exits, **options)
    assert answers(harness.engine) == expected
    assert harness.stats()["accepted_tokens"] > 0
