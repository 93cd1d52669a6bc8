"""Streaming input: vLLM's sessions, whose prompt goes on after each answer."""

from pathlib import Path
from typing import Any

import pytest

from exitserve.policy import ExitPolicy

TURNS = [([3, 5, 8, 13, 21] * 4, 6), ([9, 4, 7] * 5, 20), ([33, 2, 17] * 5, 12)]
"""Prompts, and how many tokens are generated after each."""
FIELDS: dict[str, list[dict[str, Any]]] = {
    "confidence": [{"exit_mode": "off"}, {"exit_layer": 2}, {}],
    "verify": [{"exit_mode": "verify"}, {"exit_mode": "defer", "exit_threshold": 0.05}, {}],
}


def say(engine: Any, prompt: list[int], count: int, fields: dict[str, Any]) -> list[int]:
    """One turn, as `AsyncLLM.generate` has it of a generator."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, extra_args=fields)
    request = engine.input_processor.process_inputs(
        "session",
        {"prompt_token_ids": list(prompt)},
        params,
        supported_tasks=engine.get_supported_tasks(),
        resumable=True,
    )
    request.external_req_id = "session"
    engine.output_processor.add_request(request, None)
    engine.engine_core.add_request(request)
    found: list[int] = []
    while len(found) < count:
        found += [
            token for one in engine.engine_core.get_output().outputs for token in one.new_token_ids
        ]
    return found


@pytest.mark.parametrize("mode", FIELDS)
def test_a_session_runs_at_full_depth(
    mode: str, model: Path, start: Any, oracle: Any, drafting: dict[str, Any]
) -> None:
    """Whatever policies its turns ask for: each would read what another wrote. All are counted."""
    exits = {"exits": {"exit_threshold": 0.05}} if mode == "confidence" else {}
    harness = start(model, **{**drafting, **exits})
    engine, ids = harness.engine.llm_engine, list[int]()
    try:
        for (prompt, count), fields in zip(TURNS, FIELDS[mode], strict=True):
            ids += prompt
            answer = say(engine, prompt, count, fields)
            expected = oracle(model).decode(ids, count, ExitPolicy.off(), ignore_eos=True)
            assert answer == expected.token_ids
            ids += answer[:-1]  # vLLM drops the last token, which no pass has read
    finally:
        engine.abort_request(["session"], internal=True)
    assert harness.stats()["tokens_by_depth"][6] == sum(count for _, count in TURNS)
