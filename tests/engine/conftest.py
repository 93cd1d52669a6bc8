"""Engines for tests: each holds a gigabyte, so most end with the test that started them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference


@dataclass(frozen=True)
class Job:
    """A request and what the oracle is told about it."""

    prompt: list[int]
    fields: dict[str, Any]
    max_tokens: int = 24

    @property
    def policy(self) -> ExitPolicy:
        if "exit_layer" in self.fields:
            return ExitPolicy.fixed(self.fields["exit_layer"])
        mode = self.fields.get("exit_mode", "confidence")
        return ExitPolicy.confidence(self.fields.get("exit_threshold", 1.0), mode=mode)


Outcome = tuple[list[int], list[int]]
"""Generated tokens and their depths."""


class Harness:
    """Runs jobs on an in-process engine, all at once or arriving over time."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._count = 0

    def run(self, jobs: Sequence[Job], *, every: int = 0) -> list[Outcome]:
        """Runs all jobs in one batch; with `every`, one more arrives after that many steps."""
        from exitserve.engine.launch import take_traces

        core, waiting, names, done, steps = self.engine.llm_engine, list(jobs), [], {}, 0
        while waiting or core.has_unfinished_requests():
            while waiting and (not every or steps >= len(names) * every):
                self._count += 1
                names.append(f"job-{self._count}")
                self._add(names[-1], waiting.pop(0))
            for output in core.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        return [(done[name], next(iter(take_traces(self.engine, name).values()))) for name in names]

    def counter(self, name: str) -> int:
        """A counter of vLLM's; the engine must keep statistics (`disable_log_stats=False`)."""
        (metric,) = [metric for metric in self.engine.get_metrics() if metric.name == name]
        return int(metric.value)

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
            temperature=0,
            ignore_eos=True,
            extra_args={**job.fields, "exit_trace": [name]},
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


CACHE_BYTES = 256 << 20  # 16 rows of the bundled model's longest context fit several times


@contextmanager
def engines() -> Iterator[Callable[..., Harness]]:
    """Starts engines in float32 without compilation, unless told otherwise; ends them all."""
    started: list[Any] = []

    def start(model: Any, **options: Any) -> Harness:
        from exitserve.engine.launch import start_engine

        usual = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16}
        started.append(start_engine(model, kv_cache_memory_bytes=CACHE_BYTES, **usual | options))
        return Harness(started[-1])

    try:
        yield start
    finally:
        for engine in started:
            engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    """Starts engines that end with the test."""
    with engines() as starter:
        yield starter


@pytest.fixture(scope="module")
def start_shared() -> Iterator[Callable[..., Harness]]:
    """Starts engines that the tests of a module share: starting one takes half a minute."""
    with engines() as starter:
        yield starter


@pytest.fixture(scope="session")
def expect() -> Callable[[Reference, Job], Outcome]:
    """What the oracle says of a job."""

    def expect(reference: Reference, job: Job) -> Outcome:
        found = reference.decode(job.prompt, job.max_tokens, job.policy, ignore_eos=True)
        return found.token_ids, found.exit_layers

    return expect


@pytest.fixture(scope="session")
def random_jobs() -> Callable[..., list[Job]]:
    """Requests of different lengths and policies for the tiny checkpoints."""

    def make(
        count: int = 8, longest: int = 40, max_tokens: int = 24, verifying: bool = False
    ) -> list[Job]:
        numbers = random.Random(7)
        kinds: list[dict[str, Any]] = [
            {"exit_threshold": 0.05, "exit_mode": "confidence"},
            {"exit_threshold": 0.1, "exit_mode": "confidence"},
            {"exit_threshold": 0.2, "exit_mode": "confidence"},
            {"exit_threshold": 0.1, "exit_mode": "defer"},
            {"exit_layer": 2},
            {"exit_threshold": 0.06, "exit_mode": "defer"},
            {"exit_threshold": 1.0},
            {"exit_layer": 4},
            # Only a server of mode "verify" takes these.
            {"exit_threshold": 0.06, "exit_mode": "verify"},
            {"exit_threshold": 0.1, "exit_mode": "verify"},
        ][: None if verifying else 8]
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
