"""Live quality: answers to a share of the requests are compared with full depth afterwards.

A selected request runs like any other; in addition it reports, for each of its tokens, the depth
and the most likely token there. When it has ended, its prompt and answer run through the model once
more, as one prompt at full depth. A token agrees if both passes have the same most likely token:
the text before it is the same, and which token was sampled does not matter. So a whole answer costs
one pass, not one for each of its tokens.

All tokens of an answer are compared, because a calibration promises agreement of all tokens. Those
that ran at full depth may disagree too: keys and values of earlier tokens may be approximations,
and in 16 bits a pass over a prompt rounds differently from a pass over one token.

This runs in the background, one answer at a time, and never delays or fails a request.
"""

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from exitserve.checkpoint.calibration import CALIBRATED_MODES
from exitserve.engine.recorder import TraceKeys
from exitserve.engine.request import policy_of
from exitserve.policy import AUTO, ExitRules
from exitserve.server.metrics import ShadowMetrics, Thresholds
from exitserve.server.response_fields import Traced

logger = logging.getLogger(__name__)

CAPACITY = 32
"""Requests that may wait for their comparison; more are dropped, and counted."""
LOWEST_PRIORITY = 2**31 - 1
"""The priority of a comparison, if the scheduler uses priorities: lower numbers go first."""


@dataclass
class Answer:
    """One sequence that a selected request generates: A tokens so far."""

    token_ids: list[int] = field(default_factory=list)
    """[A]."""
    most_likely: list[int] = field(default_factory=list)
    """[A] the most likely token by the raw logits, at the depth at which each token stopped."""


@dataclass(kw_only=True)
class SelectedRequest:
    """A request that will be compared with full depth, and what it generated."""

    prompt_ids: list[int]
    samples: int
    """n of the request."""
    thresholds: Thresholds
    cache_salt: str | None
    """The request's: its comparison may share cached blocks with the same requests."""
    lora_request: Any
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Under which the worker records its depths for us."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """By the index of the sample."""

    def add_output(self, output: Any, *, delta: bool, requested: int | None) -> None:
        """Adds vLLM's `RequestOutput`, and removes from it what the client did not ask for.

        Args:
            output: with log-probabilities, at least of the most likely token.
            delta: it holds only new tokens, not all so far.
            requested: number of log-probabilities that the client asked for; None if it did not.
        """
        for one in output.outputs:
            answer = self.answers.setdefault(one.index, Answer())
            if not delta:
                answer.token_ids, answer.most_likely = [], []
            answer.token_ids += one.token_ids
            answer.most_likely += [most_likely(entry) for entry in one.logprobs or ()]
            if requested is None:
                one.logprobs = one.cumulative_logprob = None
            elif requested == 0 and one.logprobs is not None:
                pairs = zip(one.token_ids, one.logprobs, strict=False)
                one.logprobs = [{token: entry[token]} for token, entry in pairs]


def most_likely(entry: Mapping[int, Any]) -> int:
    """The token of rank 1 among vLLM's log-probabilities of one position."""
    return min(entry, key=lambda token: int(entry[token].rank))


class ShadowEvaluation:
    """Selects requests, collects their answers, and compares these with full depth."""

    def __init__(
        self,
        engine: Any,
        rules: ExitRules,
        rate: float,
        metrics: ShadowMetrics,
        take_traces: Callable[[str], Awaitable[dict[str, Traced]]],
        *,
        capacity: int = CAPACITY,
    ) -> None:
        """Prepares to compare a share of the requests that may exit by confidence, of which
        `capacity` may wait for it; none is selected before `start`."""
        self._engine = engine
        self._generate = engine.generate
        self._rules = rules
        self._calibrated = rules.policy_or_off({"exit_threshold": AUTO}, structured=False)
        self._rate = rate
        self._metrics = metrics
        self._take_traces = take_traces
        self._ended: asyncio.Queue[SelectedRequest] = asyncio.Queue(capacity)
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Replaces the engine's `generate`, which the requests of all routes go through."""
        self._task = asyncio.create_task(self._run())
        self._engine.generate = self.generate

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """vLLM's `AsyncLLM.generate`, with the same arguments and results."""
        selected = self._select(prompt, sampling_params, options)
        if selected is None:
            outputs: AsyncGenerator[Any, None] = self._generate(
                prompt, sampling_params, request_id, **options
            )
            return outputs
        requested, kind = sampling_params.logprobs, sampling_params.output_kind
        sampling_params = traced_params(sampling_params, selected.key)
        outputs = self._generate(prompt, sampling_params, request_id, **options)
        delta = kind == RequestOutputKind.DELTA
        return self._follow(selected, outputs, delta=delta, requested=requested)

    def _select(
        self, prompt: Any, params: Any, options: Mapping[str, Any]
    ) -> SelectedRequest | None:
        """The request, if it is selected for a comparison."""
        policy = policy_of(params, self._rules)
        may_exit = policy.mode in CALIBRATED_MODES and params.max_tokens != 1
        # A grammar restricts the most likely token, and full depth does not apply the grammar. With
        # `logprob_token_ids`, vLLM does not return the most likely token.
        is_free = params.structured_outputs is None and params.logprob_token_ids is None
        has_ids = isinstance(prompt, Mapping) and prompt.get("type") == "token"
        if not (may_exit and is_free and has_ids) or random.random() >= self._rate:
            return None
        return SelectedRequest(
            prompt_ids=list(prompt["prompt_token_ids"]),
            samples=params.n,
            thresholds="calibrated" if policy == self._calibrated else "other",
            cache_salt=prompt.get("cache_salt"),
            lora_request=options.get("lora_request"),
        )

    async def _follow(
        self,
        selected: SelectedRequest,
        outputs: AsyncGenerator[Any, None],
        *,
        delta: bool,
        requested: int | None,
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    selected.add_output(output, delta=delta, requested=requested)
                    yield output
            finally:  # also if the client disconnects
                if any(answer.token_ids for answer in selected.answers.values()):
                    self._enqueue(selected)

    def _enqueue(self, selected: SelectedRequest) -> None:
        try:
            self._ended.put_nowait(selected)
        except asyncio.QueueFull:
            self._metrics.dropped("queue_full")

    async def _run(self) -> None:
        """Compares ended requests, until the server's loop or its engine ends."""
        while True:
            selected = await self._ended.get()
            try:
                await self._compare(selected)
            except Exception as error:  # noqa: BLE001  # whatever it is, requests must go on
                if self._engine.errored:
                    return
                self._metrics.dropped("error")
                if not self._failed:
                    logger.warning("an answer could not be compared with full depth: %r", error)
                self._failed = True

    async def _compare(self, selected: SelectedRequest) -> None:
        traces = await self._take_traces(selected.key)
        depths = {sample_index(name, selected.samples): found for name, found in traces.items()}
        for index, answer in selected.answers.items():
            if not depths.get(index, {}).keys() >= set(range(len(answer.token_ids))):
                self._metrics.dropped("no_trace")
                return
        for index, answer in selected.answers.items():
            if not answer.token_ids:
                continue
            full_depth = await self._full_depth(selected, answer.token_ids)
            tokens, agreed = Counter[int](), Counter[int]()
            pairs = zip(answer.most_likely, full_depth, strict=True)
            for position, (at_exit, at_full_depth) in enumerate(pairs):
                depth, _ = depths[index][position]
                tokens[depth] += 1
                agreed[depth] += at_exit == at_full_depth
            for depth, count in tokens.items():
                self._metrics.compared(
                    depth, selected.thresholds, tokens=count, agreed=agreed[depth]
                )

    async def _full_depth(self, selected: SelectedRequest, token_ids: Sequence[int]) -> list[int]:
        """Full depth's most likely token at each position [A] of an answer, given those before.

        The prompt leaves out the answer's last token, for which the pass generates a token itself.
        So it fits even if the answer filled the context.
        """
        prompt = tokens_input(
            [*selected.prompt_ids, *token_ids[:-1]], cache_salt=selected.cache_salt
        )
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"exit_mode": "off"},
        )
        name = f"shadow-{uuid.uuid4().hex}"
        outputs = self._generate(
            prompt, params, name, lora_request=selected.lora_request, priority=LOWEST_PRIORITY
        )
        (output,) = [one async for one in outputs]
        compared = output.prompt_logprobs[len(selected.prompt_ids) :]
        return [*(most_likely(entry) for entry in compared), output.outputs[0].token_ids[0]]


def traced_params(params: Any, key: str) -> Any:
    """Sampling parameters that also ask for a request's depths and most likely tokens.

    Args:
        params: vLLM's; not modified.
        key: under which depths are recorded, in addition to the key of the request's own trace.
    """
    changed = params.clone()
    fields = dict(params.extra_args or {})
    existing = fields.get("exit_trace")
    if not isinstance(existing, list):  # a client's keys stay as they are: they will be refused
        keys = existing if isinstance(existing, TraceKeys) else ()
        fields["exit_trace"] = TraceKeys([*keys, key])
    changed.extra_args = fields
    changed.logprobs = params.logprobs or 1
    return changed


def sample_index(request_id: str, samples: int) -> int:
    """The index of the sequence that an engine request generates; `samples` is n.

    vLLM splits a request with n > 1 into requests named "{index}_" and the original name.
    """
    return int(request_id.partition("_")[0]) if samples > 1 else 0
