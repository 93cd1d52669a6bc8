"""Random weights whose drafts are accepted by lot, on the runner of GPUs."""

from pathlib import Path

import pytest

from exitserve.bench.forced import start_forced_engine
from exitserve.engine.launch import greedy_params

from ...bench.test_forced import OPTIONS


@pytest.mark.parametrize("mode", ["verify", pytest.param("defer", marks=pytest.mark.nightly)])
def test_as_often_as_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    exits = {"mode": mode, "exit_threshold": 0.5, "num_drafts": 3}
    shares = {"confidence": 0.8, "acceptance": 0.9}
    engine = start_forced_engine(model, shares, exits=exits, **OPTIONS)
    prompts = [{"prompt_token_ids": [5 + index, 9, 40]} for index in range(8)]
    found = engine.generate(prompts, greedy_params(48), use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == 48 for one in found)
    stats = engine.collective_rpc("exit_stats")[0]
    # Of three drafts 0.9, 0.9^2 and 0.9^3 are accepted; some hundred draws.
    share = stats["accepted_tokens"] / stats["drafted_tokens"]
    assert share == pytest.approx((0.9 + 0.9**2 + 0.9**3) / 3, abs=0.09)
    engine.llm_engine.engine_core.shutdown()
