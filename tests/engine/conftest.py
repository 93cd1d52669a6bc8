"""What tests of the engine share: requests, engines that run them, and the oracle's answers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference

from .pool import POOL, end, launch, needs_processes


@dataclass(frozen=True)
class Job:
    """A request and what the oracle is told about it."""

    prompt: list[int]
    fields: dict[str, Any]
    max_tokens: int = 24
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM's fields, such as need the whole head, and by which the likeliest token is taken."""

    @property
    def policy(self) -> ExitPolicy:
        if "exit_layer" in self.fields:
            return ExitPolicy.fixed(self.fields["exit_layer"])
        mode = self.fields.get("exit_mode", "confidence")
        return ExitPolicy.confidence(self.fields.get("exit_threshold", 1.0), mode=mode)


Outcome = tuple[list[int], list[int]]
"""Generated tokens and their depths."""


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Counts by how much they grew, at any depth; what is no count stays as it is."""
    return {
        key: since(before[key], value)
        if isinstance(value, dict)
        else value
        if key in NO_COUNTS or not isinstance(value, int)
        else value - before[key]
        for key, value in now.items()
    }


NO_COUNTS = ("num_layers",)
NAMES = itertools.count(1)
"""Of requests: none comes twice in an engine, whoever shares it."""


class Harness:
    """Runs jobs on an engine, all at once or arriving over time; counts from when it was made."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._stats = self._all_stats()
        self._counters = self._all_counters()

    def run(self, jobs: Sequence[Job], *, every: int = 0) -> list[Outcome]:
        """Runs all jobs in one batch; with `every`, one more arrives after that many steps."""
        from exitserve.bench.engines import take_traces

        core, waiting, names, done, steps = self.engine.llm_engine, list(jobs), [], {}, 0
        while waiting or core.has_unfinished_requests():
            while waiting and (not every or steps >= len(names) * every):
                names.append(f"job-{next(NAMES)}")
                self._add(names[-1], waiting.pop(0))
            for output in core.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        return [(done[name], next(iter(take_traces(self.engine, name).values()))) for name in names]

    def stats(self) -> dict[str, Any]:
        """The engine's own counts."""
        return since(self._stats, self._all_stats())

    def counter(self, name: str) -> int:
        """A counter of vLLM's; the engine must keep statistics (`disable_log_stats=False`)."""
        return self._all_counters()[name] - self._counters[name]

    def _all_stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.collective_rpc("exit_stats")[0]
        return found

    def _all_counters(self) -> dict[str, int]:
        if not self.engine.llm_engine.log_stats:
            return {}
        metrics = self.engine.get_metrics()
        return {one.name: int(one.value) for one in metrics if hasattr(one, "value")}

    def logprobs(self, prompt: list[int], count: int = 8) -> list[dict[int, float]]:
        """The five likeliest next tokens at full depth, for each of `count` greedy tokens."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            logprobs=5,
            extra_args={"exit_threshold": 1.0},
        )
        (output,) = self.engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found = output.outputs[0].logprobs
        return [{token: one.logprob for token, one in place.items()} for place in found]

    def _add(self, name: str, job: Job) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=job.max_tokens,
            ignore_eos=True,
            extra_args={**job.fields, "exit_trace": [name]},
            **{"temperature": 0, **job.sampling},
        )
        self.engine.llm_engine.add_request(name, {"prompt_token_ids": job.prompt}, params)


@pytest.fixture(scope="session")
def job() -> type[Job]:
    """The class of requests, for tests that make their own."""
    return Job


FEW_BLOCKS = {
    "enable_prefix_caching": False,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "max_model_len": 128,
    "max_num_seqs": 10,
    "disable_log_stats": False,
}


@pytest.fixture(scope="session")
def few_blocks() -> dict[str, Any]:
    """Engine options with which ten requests of a hundred tokens preempt each other."""
    return FEW_BLOCKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends the pool with the last test here: other tests want no process group about."""
    try:
        return (yield)
    finally:
        if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
            POOL.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    """Starts engines in float32 without compilation, unless told otherwise.

    Those that need processes end with the test.
    """
    own: list[Any] = []

    def start(model: Path | str, **options: Any) -> Harness:
        if not needs_processes(model, options):
            return Harness(POOL.engine(model, options))
        POOL.make_way(options)
        own.append(launch(model, options))
        return Harness(own[-1])

    yield start
    for engine in own:
        end(engine, last=not POOL)


@pytest.fixture(scope="module")
def start_shared() -> Callable[..., Harness]:
    """`start` for a whole module; never of engines that need processes."""
    return lambda model, **options: Harness(POOL.engine(model, options))


@pytest.fixture(scope="session")
def start_plain() -> Callable[..., Any]:
    """Starts a `vllm.LLM` with nothing of ours."""
    return lambda model, **options: POOL.engine(model, options, plain=True)


@pytest.fixture(scope="session")
def expect() -> Callable[[Reference, Job], Outcome]:
    """What the oracle says of a job."""

    def expect(reference: Reference, job: Job) -> Outcome:
        if not job.sampling:
            found = reference.decode(job.prompt, job.max_tokens, job.policy, ignore_eos=True)
            return found.token_ids, found.exit_layers
        ids, depths = list(job.prompt), list[int]()
        for _ in range(job.max_tokens):
            trace = reference.trace(ids, len(job.prompt), job.policy)
            ids.append(int(trace.logits[-1].argmax()))
            depths.append(int(trace.depth[-1]))
        return ids[len(job.prompt) :], depths

    return expect


@pytest.fixture(scope="session")
def random_jobs() -> Callable[..., list[Job]]:
    """Requests of different lengths and policies for the tiny checkpoints."""

    def make(count: int = 8, longest: int = 40, max_tokens: int = 24) -> list[Job]:
        numbers = random.Random(7)
        kinds: list[dict[str, Any]] = [
            {"exit_threshold": 0.05, "exit_mode": "confidence"},
            {"exit_threshold": 0.1, "exit_mode": "confidence"},
            {"exit_threshold": 0.2, "exit_mode": "confidence"},
            {"exit_layer": 2},
            {"exit_threshold": 1.0},
            {"exit_layer": 4},
        ]
        return [
            Job(
                [numbers.randrange(2, 128) for _ in range(numbers.randrange(3, longest))],
                kinds[index % len(kinds)],
                max_tokens,
            )
            for index in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[[Any], Reference]:
    """The oracle of a checkpoint."""
    return lambda model: load_reference(str(model))


@pytest.fixture(scope="session")
def make_family(make_checkpoint: Any) -> Callable[..., Path]:
    """`make_family("GPT2LMHeadModel")`: a tiny checkpoint of an architecture."""
    families = json.loads((Path(__file__).parent / "families.json").read_text())

    def make(architecture: str, **changes: Any) -> Path:
        family, own = families[architecture]
        found: Path = make_checkpoint(family, **own, **changes)
        return found

    return make


DRAFT_LAYER = 2
"""Of 6: where the tiny checkpoints draft."""
KINDS: dict[str, dict[str, Any]] = {
    "verify": {"exit_mode": "verify", "exit_threshold": 0.1},
    "defer": {"exit_mode": "defer", "exit_threshold": 0.08},
    "off": {"exit_mode": "off"},
    "daring": {"exit_mode": "defer", "exit_threshold": 0.04},
}
"""Fields of requests that a server which drafts takes."""


@pytest.fixture(scope="session")
def drafting() -> dict[str, Any]:
    """Options of engines that draft three tokens a step, prompts of more than 64 in chunks."""
    exits = {"mode": "verify", "exit_threshold": 0.1, "exit_layers": [DRAFT_LAYER], "num_drafts": 3}
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return {"exits": exits, "enable_prefix_caching": False, **sizes}


@pytest.fixture(scope="session")
def asking(job: Any) -> Callable[..., list[Any]]:
    """`asking(jobs, "defer")`: the jobs, of one of `KINDS`, or of all in turn."""

    def asking(jobs: Sequence[Any], kind: str | None = None) -> list[Any]:
        names = list(KINDS) if kind is None else [kind]
        return [
            job(one.prompt, KINDS[names[index % len(names)]], one.max_tokens)
            for index, one in enumerate(jobs)
        ]

    return asking


@pytest.fixture(scope="session")
def model(make_checkpoint: Any) -> Path:
    """A checkpoint with one exit."""
    found: Path = make_checkpoint("llama", exits=(DRAFT_LAYER,))
    return found


@pytest.fixture(scope="session")
def expected(expect: Any) -> Callable[..., list[Any]]:
    """`expected(model, jobs)`: the oracle's tokens and depths; in mode "verify" full depth's."""

    def expected(model: Path, jobs: Sequence[Any]) -> list[Any]:
        reference = load_reference(str(model))
        asked = [
            one if one.fields["exit_mode"] == "defer" else type(one)(one.prompt, {}, one.max_tokens)
            for one in jobs
        ]
        return [expect(reference, one) for one in asked]

    return expected


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, rows that exit keep their places, as where a request is computed anew."""
    from exitserve.engine.early_exit import forward

    monkeypatch.setattr(forward, "can_narrow", lambda _: False)
