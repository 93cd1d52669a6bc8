"""Which requests are drawn, and that judging them holds up and fails no other.

The engine here is a few lines that speak vLLM's types; `tests/e2e/test_shadow.py` has a real one.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.inputs.engine import embeds_input, tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.engine.recorder import TraceKeys
from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy, ExitRules
from exitserve.server import shadow_evaluation
from exitserve.server.metrics import ShadowMetrics
from exitserve.server.response_fields import Traced
from exitserve.server.shadow_evaluation import ShadowEvaluation, traced_params
from exitserve.server.unsupported_features import check_shadow_rate

from ..shapes import calibration_of

MODEL = "tiny"
POINT = OperatingPoint(agreement=0.9, thresholds={2: 0.5}, eos_thresholds={2: 0.8})
CHEAPER = OperatingPoint(agreement=0.8, thresholds={2: 0.4}, eos_thresholds={2: 0.8})
RULES = ExitRules(
    num_layers=6,
    exit_layers=(2, 4),
    default=ExitPolicy.calibrated(POINT, mode="confidence"),
    num_drafts=4,
    modes=("off", "confidence", "defer", "verify", "fixed"),
    calibration=calibration_of(POINT, CHEAPER, mode="confidence", num_layers=6),
)
EARLY = {"exit_threshold": "auto"}
PROMPT = tokens_input([7, 8, 9], cache_salt="mine")
TOKENS = [10, 11, 12, 13]
LIKELIEST = [10, 21, 12, 13]
"""At the exits; the second token was sampled."""
FULL_DEPTH = [10, 21, 12, 23]
DEPTHS = {0: 6, 1: 2, 2: 2, 3: 4}


def ranks(token: int, best: int) -> dict[int, Logprob]:
    """As vLLM tells them: the chosen token first, then the likeliest."""
    return {token: Logprob(-2.0, 2)} | {best: Logprob(-1.0, 1)}


class Engine:
    """Answers every request with TOKENS, and every judging pass with FULL_DEPTH."""

    def __init__(self) -> None:
        self.errored = False
        self.judged: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.free = asyncio.Event()
        self.free.set()
        self.failures = 0

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        if params.prompt_logprobs is None:
            step = 1 if params.output_kind == RequestOutputKind.DELTA else len(TOKENS)
            for start in range(0, len(TOKENS), step):
                places = range(start, start + step)
                entries = [ranks(TOKENS[i], LIKELIEST[i]) for i in places]
                end = start + step == len(TOKENS)
                yield self._output(prompt, TOKENS[start : start + step], entries, None, end=end)
            return
        self.judged.append((prompt, params, options))
        await self.free.wait()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no room")
        text = prompt["prompt_token_ids"][1:]
        best = [0, 0, *FULL_DEPTH][: len(text)]
        entries = [None, *(ranks(*pair) for pair in zip(text, best, strict=True))]
        yield self._output(prompt, FULL_DEPTH[-1:], None, entries, end=True)

    def _output(
        self, prompt: Any, token_ids: Any, logprobs: Any, of_prompt: Any, *, end: bool
    ) -> Any:
        one = CompletionOutput(0, "", token_ids, -1.0, logprobs, "length" if end else None)
        return RequestOutput("r", None, prompt["prompt_token_ids"], of_prompt, [one], end)


class Trial:
    """A `ShadowEvaluation` over an `Engine`, inside a running loop."""

    def __init__(self, rate: float = 1.0, capacity: int = 8) -> None:
        self.engine: Any = Engine()
        self.registry = CollectorRegistry()
        self.depths = dict(DEPTHS)
        metrics = ShadowMetrics(self.registry, MODEL, (2, 4, 6))
        self.shadow = ShadowEvaluation(
            self.engine, RULES, rate, metrics, self.traces, capacity=capacity
        )
        self.shadow.start()

    async def traces(self, key: str) -> dict[str, Traced]:
        return {"r": {index: (depth, "") for index, depth in self.depths.items()}}

    async def ask(self, fields: dict[str, Any] = EARLY, **options: Any) -> list[Any]:
        params = SamplingParams(max_tokens=4, extra_args=fields, **options)
        return [one async for one in self.engine.generate(PROMPT, params, "r", lora_request="L")]

    def count(self, name: str, **labels: str) -> float:
        labels = {"model_name": MODEL, **labels}
        return self.registry.get_sample_value(f"exitserve_shadow_{name}_total", labels) or 0.0

    async def rest(self) -> None:
        """Lets the background work go as far as it gets."""
        for _ in range(100):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fields", "options", "thresholds"),
    [
        ({}, {}, "calibrated"),
        ({"exit_threshold": "auto"}, {}, "calibrated"),
        ({"exit_target": 0.9}, {}, "calibrated"),  # the same thresholds
        ({"exit_target": 0.8}, {}, "other"),
        ({"exit_threshold": 0.5}, {}, "other"),
        ({"exit_threshold": 0.5, "exit_mode": "defer"}, {}, "other"),
        ({"exit_mode": "off"}, {}, None),
        ({"exit_mode": "verify"}, {}, None),
        ({"exit_threshold": 1}, {}, None),
        ({"exit_layer": 2}, {}, None),
        ({"exit_threshold": -1}, {}, None),
        ({}, {"max_tokens": 1}, None),
        ({}, {"max_tokens": None}, "calibrated"),
        (EARLY, {"structured_outputs": StructuredOutputsParams(choice=["a"])}, None),
        ({}, {"logprob_token_ids": [1]}, None),
    ],
)
def test_what_may_be_drawn(fields: Any, options: Any, thresholds: str | None) -> None:
    async def draw() -> Any:
        params = SamplingParams(**{"max_tokens": 4, "extra_args": fields} | options)
        trial = Trial()
        assert trial.shadow._select(embeds_input(None), params, {}) is None
        return trial.shadow._select(PROMPT, params, {})

    drawn = asyncio.run(draw())
    assert (drawn and drawn.thresholds) == thresholds


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("asked", [None, 0, 2])
def test_answers_are_judged_and_told_as_they_were_asked_for(
    kind: RequestOutputKind, asked: int | None
) -> None:
    async def run() -> tuple[Trial, list[Any]]:
        trial = Trial()
        outputs = await trial.ask(output_kind=kind, logprobs=asked)
        await trial.rest()
        return trial, [one for output in outputs for one in output.outputs]

    trial, told = asyncio.run(run())
    for depth, tokens, agreed in (("2", 2, 2), ("4", 1, 0), ("6", 1, 1)):
        labels = {"exit_layer": depth, "thresholds": "calibrated"}
        assert trial.count("tokens", **labels) == tokens
        assert trial.count("agreed", **labels) == agreed
    ((prompt, params, options),) = trial.engine.judged
    assert prompt == tokens_input([7, 8, 9, 10, 11, 12], cache_salt="mine")
    assert (params.max_tokens, params.temperature) == (1, 0)
    assert options["lora_request"] == "L"
    entries = [entry for one in told for entry in one.logprobs or ()]
    best = [list(entry) for entry in entries]
    expected = {None: [], 0: [[token] for token in TOKENS]}
    everything = [list(ranks(*pair)) for pair in zip(TOKENS, LIKELIEST, strict=True)]
    assert best == expected.get(asked, everything)
    assert all((one.cumulative_logprob is None) == (asked is None) for one in told)


def test_nobody_waits_for_the_judge_and_what_cannot_wait_is_dropped() -> None:
    async def run() -> Trial:
        trial = Trial(capacity=2)
        trial.engine.free.clear()
        for _ in range(6):
            assert len(await trial.ask()) == 1
            await trial.rest()
        assert trial.count("dropped", reason="queue_full") == 3
        assert len(trial.engine.judged) == 1, "one at a time"
        trial.engine.free.set()
        await trial.rest()
        return trial

    trial = asyncio.run(run())
    assert len(trial.engine.judged) == 3
    assert trial.count("tokens", exit_layer="2", thresholds="calibrated") == 3 * 2


def test_a_judge_that_fails_is_counted_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(shadow_evaluation.logger, "warning", lambda *message: told.append(message))

    async def run() -> Trial:
        trial = Trial()
        trial.engine.failures = 2
        for _ in range(3):
            await trial.ask()
        await trial.rest()
        return trial

    trial = asyncio.run(run())
    assert trial.count("dropped", reason="error") == 2
    assert trial.count("tokens", exit_layer="2", thresholds="calibrated") == 2
    assert len(told) == 1, "the log is not filled with what a counter tells"


def test_answers_whose_depths_are_lost_are_not_judged() -> None:
    async def run() -> Trial:
        trial = Trial()
        del trial.depths[2]
        await trial.ask()
        await trial.rest()
        return trial

    trial = asyncio.run(run())
    assert trial.count("dropped", reason="no_trace") == 1
    assert trial.engine.judged == []


def test_drafts_of_the_first_layers_are_not_compared(monkeypatch) -> None:
    """On GPUs. (On a CPU, what is compared does not draft.)"""
    arguments = SimpleNamespace(max_logprobs=20, logprobs_mode="raw_logprobs")
    check_shadow_rate(0.1, RULES, arguments)
    drafting = replace(RULES, num_drafts=4)
    check_shadow_rate(0.1, drafting, arguments)
    monkeypatch.setattr("exitserve.server.unsupported_features.runs_on_v2", lambda: True)
    with pytest.raises(ExitServeError, match="draft on a GPU"):
        check_shadow_rate(0.1, drafting, arguments)


def test_the_clients_own_trace_and_parameters_stay() -> None:
    params = SamplingParams(extra_args={"exit_trace": TraceKeys(["theirs"])}, logprobs=5)
    changed = traced_params(params, "ours")
    assert changed.extra_args == {"exit_trace": TraceKeys(["theirs", "ours"])}
    assert changed.logprobs == params.logprobs == 5
    assert params.extra_args == {"exit_trace": TraceKeys(["theirs"])}
    assert traced_params(SamplingParams(), "ours").extra_args == {"exit_trace": TraceKeys(["ours"])}
