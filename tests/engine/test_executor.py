"""A step is one call of the worker, where vLLM makes two, or three with drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from exitserve.engine.launch import EXECUTOR, executor_option

PROMPTS = ["def main(", "class A:\n    def __init__(self", "import os\nimport sys\n", "x = [1, 2"]
TOKENS = 24
OPTIONS = {"enable_prefix_caching": False, "max_model_len": 256}


def params(*, grammar: bool = False):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    shape = StructuredOutputsParams(regex=r"[a-z]{4} = [0-9]{3}") if grammar else None
    return SamplingParams(
        max_tokens=TOKENS, temperature=0, structured_outputs=shape, ignore_eos=not grammar
    )


def answers(engine, *, grammars: int = 0) -> list[tuple[int, ...]]:
    """Of all prompts, the first of which are bound by a grammar."""
    chosen = [params(grammar=index < grammars) for index in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, chosen, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(start_plain, bundled) -> list[list[tuple[int, ...]]]:
    """What plain vLLM says: without a grammar, and with one in the batch."""
    plain = start_plain(bundled, **OPTIONS)
    return [answers(plain), answers(plain, grammars=1)]


@pytest.fixture(params=["verify", "off"])
def engine(request, start, bundled) -> Iterator:
    exits = {"mode": request.param, "exit_checks": "all"}
    if request.param == "verify":
        exits["exit_threshold"] = 0.3
    harness = start(bundled, exits=exits, distributed_executor_backend=EXECUTOR, **OPTIONS)
    yield harness.engine


@pytest.fixture
def calls(engine, monkeypatch) -> Counter[str]:
    """Calls of the worker, by method."""
    found: Counter[str] = Counter()
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    call = executor.collective_rpc

    def counted(method, *args, **kwargs):
        found[method] += 1
        return call(method, *args, **kwargs)

    monkeypatch.setattr(executor, "collective_rpc", counted)
    return found


def test_a_step_is_one_call(engine, calls, expected) -> None:
    drafts = engine.llm_engine.vllm_config.speculative_config is not None
    assert answers(engine) == expected[0]
    assert set(calls) == {"exit_step"}
    assert (calls["exit_step"] < TOKENS) == drafts, "drafts were accepted"
    calls.clear()
    assert answers(engine, grammars=1) == expected[1]
    parts = {"execute_model", "sample_tokens"} | ({"take_draft_token_ids"} if drafts else set())
    assert set(calls) == {"exit_step"} | parts, "the others go on when the grammar has ended"


def test_a_worker_that_fails_ends_the_step(engine) -> None:
    """Its error reaches the core, which ends the engine as vLLM does."""
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    step = executor.collective_rpc("exit_step", args=(None,), non_block=True)
    with pytest.raises(RuntimeError, match="Worker failed"):
        step.result()


@pytest.mark.parametrize(("in_processes", "named"), [("1", True), ("0", False)])
def test_only_an_engine_in_processes_gets_it(monkeypatch, in_processes: str, named: bool) -> None:
    from vllm import envs

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", in_processes)
    assert bool(executor_option()) == named
