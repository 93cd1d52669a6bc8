"""Runner V2 with CUDA graphs that are recorded: profiled, torn down, captured, replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..recording import RecordedGraph
from .graphs import SITE, SIZES, LastPass, capture_pieces, let_capture, update_metadata_in_graphs

pytestmark = pytest.mark.nightly

COMPILATION = {"cudagraph_capture_sizes": SIZES}
"""Engines that are told so capture graphs, and no test without graphs shares them."""
EXITS = {"exit_rows": "frequent"}
OPTIONS = {"enable_prefix_caching": False, "max_num_seqs": 8, "max_model_len": 128}


@pytest.fixture(scope="module")
def graphs() -> Iterator[list[RecordedGraph]]:
    """Lets engines here capture decodes; all graphs that were captured."""
    with pytest.MonkeyPatch.context() as patch:
        yield let_capture(patch)


def test_exits_that_the_device_decides(
    graphs, start, oracle, expect, make_checkpoint, random_jobs
) -> None:
    """Rows come, go and exit; the last are fewer than the graph's."""
    model = make_checkpoint("llama")
    jobs = random_jobs(count=8, max_tokens=16)
    expected = [expect(oracle(model), one) for one in jobs]
    harness = start(model, exits=EXITS, compilation_config=COMPILATION, **OPTIONS)
    assert harness.run(jobs) == expected
    assert harness.run(jobs, every=3) == expected
    depths = {depth for _, found in expected for depth in found}
    assert depths == {2, 4, 6} and sum(one.replays for one in graphs) > 30


def test_requests_that_come_back(
    graphs, start, oracle, expect, make_checkpoint, random_jobs, few_blocks
) -> None:
    """Tokens of a preempted request are computed again outside of graphs, and go on in them."""
    model = make_checkpoint("llama")
    jobs = random_jobs(count=12, longest=60, max_tokens=50)
    harness = start(model, exits=EXITS, compilation_config=COMPILATION, **few_blocks)
    assert harness.run(jobs) == [expect(oracle(model), one) for one in jobs]
    assert harness.counter("vllm:num_preemptions") > 0


def test_two_ranks(start, oracle, expect, make_checkpoint, random_jobs, monkeypatch) -> None:
    """Collectives lie in graphs, those of checks in branches: every rank must come to them."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.syspath_prepend(str(SITE))  # which processes inherit
    model = make_checkpoint("llama")
    jobs = random_jobs(count=6, max_tokens=12)
    ranks = {"tensor_parallel_size": 2, "worker_cls": "graph_worker.GraphWorker"}
    harness = start(model, exits=EXITS, compilation_config=COMPILATION, **OPTIONS, **ranks)
    assert harness.run(jobs) == [expect(oracle(model), one) for one in jobs]
    first, second = harness.engine.collective_rpc("graph_replays")
    assert first == second > 5


ACCEPTED: set[int] = set()


@pytest.mark.parametrize("length", [128, 120])
def test_drafts_and_their_judge(
    graphs, start, expected, model, asking, random_jobs, drafting, monkeypatch, length: int
) -> None:
    """Each draft in a graph of its own, and all drafts of a step in one."""
    fused = length == 120  # which also keeps the engines apart
    if fused:
        update_metadata_in_graphs(monkeypatch, LastPass.current)
    drafting = {**drafting, "max_model_len": length}
    jobs = asking(random_jobs(count=6, max_tokens=12))
    told = expected(model, jobs)
    before = len(graphs)
    harness = start(model, compilation_config=COMPILATION, disable_log_stats=False, **drafting)
    core = harness.engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.speculator.supports_decode_metadata_update == fused

    def accepted() -> int:
        return harness.counter("vllm:spec_decode_num_accepted_tokens")

    assert harness.run(jobs) == told
    in_graphs = accepted()
    assert harness.run(jobs, every=3) == told
    replayed = [one for one in graphs[before:] if one.replays]
    assert len(replayed) >= 4, "graphs of drafts, and graphs of their judge"
    replays, arrived = sum(one.replays for one in replayed), accepted()
    for manager in (runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager):
        monkeypatch.setattr(manager, "_graphs_captured", False)
    assert harness.run(jobs) == told
    assert sum(one.replays for one in replayed) == replays, "without graphs"
    assert accepted() - arrived == in_graphs > 0, "a judge hides drafts that are wrong"
    ACCEPTED.add(in_graphs)
    assert len(ACCEPTED) == 1, "however drafts are captured"


COMPILED = {"enforce_eager": False, "compilation_config": COMPILATION}


def test_exits_and_pieces(start, oracle, expect, make_checkpoint, random_jobs, monkeypatch) -> None:
    """Prompts, and decodes beside them, run in pieces that are captured by themselves."""
    monkeypatch.syspath_prepend(str(SITE))
    capture_pieces(monkeypatch)
    model = make_checkpoint("llama")
    jobs = random_jobs(count=6, max_tokens=12)
    harness = start(
        model, exits=EXITS, worker_cls="graph_worker.GraphWorker", **COMPILED, **OPTIONS
    )
    assert harness.run(jobs, every=3) == [expect(oracle(model), one) for one in jobs]
    (replayed,) = harness.engine.collective_rpc("graphs_replayed")
    assert replayed > 2 * len(SIZES), "more than hold whole passes, and drafts"


def test_drafts_and_pieces(
    start, expected, model, asking, random_jobs, drafting, monkeypatch
) -> None:
    """See `test_exits_and_pieces`."""
    monkeypatch.syspath_prepend(str(SITE))
    capture_pieces(monkeypatch)
    jobs = asking(random_jobs(count=6, max_tokens=12))
    harness = start(model, worker_cls="graph_worker.DraftingWorker", **COMPILED, **drafting)
    assert harness.run(jobs, every=3) == expected(model, jobs)
    (replayed,) = harness.engine.collective_rpc("graphs_replayed")
    assert replayed > 2 * len(SIZES), "more than hold whole passes, and drafts"
