"""Every architecture against the oracle, on tiny random checkpoints in float32.

Gains and biases are random too, contexts outgrow the attention windows, and every checkpoint has
several key-value heads for several query heads unless its line says otherwise.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from exitserve.engine.hooks.plugin import ARCHITECTURES, ENTRY_POINTS, architectures, register

FAMILIES: dict[str, Any] = json.loads((Path(__file__).parent / "families.json").read_text())


def test_the_table_is_complete() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_engine_is_the_oracle(
    start, oracle, expect, random_jobs, make_family, architecture: str
) -> None:
    model = make_family(architecture)
    jobs = random_jobs(count=8, max_tokens=40)  # past the windows of 32
    reference = oracle(model)
    expected = [expect(reference, one) for one in jobs]
    assert {2, 4, 6} <= {depth for _, depths in expected for depth in depths}
    harness = start(model, enable_prefix_caching=False)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=2) == expected


def test_another_package_brings_its_own(
    start, oracle, expect, random_jobs, make_checkpoint, tmp_path, monkeypatch
) -> None:
    """As docs/adding-an-architecture.md says: a class, an entry point, nothing else."""
    (tmp_path / "elsewhere.py").write_text(
        "from exitserve.engine.model import MultiExitMixin\n"
        "from vllm.model_executor.models.llama import LlamaForCausalLM\n"
        "class MultiExitHomemade(MultiExitMixin, LlamaForCausalLM): ...\n"
    )
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nHomemadeForCausalLM = elsewhere:MultiExitHomemade\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    architectures.cache_clear()
    register()  # a new process does so by itself; this one has loaded its plugins already
    model = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), model)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["HomemadeForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))

    jobs = random_jobs(count=4)
    reference = oracle(model)
    try:
        assert start(model).run(jobs) == [expect(reference, one) for one in jobs]
    finally:
        architectures.cache_clear()
