"""Random weights whose checks and drafts succeed by lot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exitserve.bench.forced import start_forced_engine
from exitserve.engine.launch import greedy_params, start_plain_engine
from exitserve.errors import ExitServeError

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 64 << 20,
    "load_format": "dummy",
}


@pytest.mark.parametrize("mode", ["verify", "defer"])
def test_drafts_are_not_accepted_by_lot_on_a_cpu(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ExitServeError, match="allowed: confidence and fixed"):
        start_forced_engine(tmp_path, {"confidence": 0.8, "acceptance": 0.9}, exits={"mode": mode})


def test_beside_plain_vllm_as_often_as_asked_for(
    make_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exitserve bench` starts plain vLLM first."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model: Path = make_checkpoint("llama")
    prompts = [{"prompt_token_ids": [5 + index, 9, 40]} for index in range(8)]
    params = greedy_params(60)
    plain = start_plain_engine(model, **OPTIONS)
    exits = {"mode": "confidence", "exit_threshold": 0.5, "exit_layers": [2], "exit_rows": "all"}
    forced = start_forced_engine(
        model, {"confidence": 0.8, "acceptance": 0.9}, exits=exits, **OPTIONS
    )
    for engine in (plain, forced):
        found = engine.generate(prompts, params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == 60 for one in found)
    stats = forced.collective_rpc("exit_stats")[0]
    # Eight requests of sixty tokens: a few hundred draws, so two in a hundred are one deviation.
    assert stats["passed"][2] / stats["checks"][2] == pytest.approx(0.8, abs=0.08)
    for engine in (forced, plain):
        engine.llm_engine.engine_core.shutdown()
