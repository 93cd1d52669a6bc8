"""Live quality: the answers of a share of the requests are judged by full depth afterwards.

A request that is drawn runs like any other; it only has to tell, for each of its tokens, the depth
and the likeliest token there. When it has ended, its prompt and answer go through the model once
more, as one prompt, which runs at full depth. Where both have the same likeliest token, they agree:
the text before is the same for both, and what was sampled does not matter. So a whole answer costs
one pass, not one for each of its tokens.

All tokens of an answer are judged, since a calibration promises agreement of all. Those that ran
at full depth may disagree too: keys and values of tokens before them may be approximations, and
in 16 bits a pass over a prompt rounds differently from one over a token.

Judging is done in the background, one answer at a time, and never holds up or fails a request.
"""

from __future__ import annotations

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

from exitserve.calibration_record import CALIBRATED_MODES
from exitserve.policy import AUTO, ExitRules
from exitserve.server.metrics import ShadowMetrics, Thresholds
from exitserve.server.traces import Depths

logger = logging.getLogger(__name__)

CAPACITY = 32
"""Requests that may wait to be judged; more are dropped, and counted."""
LAST = 2**31 - 1
"""The priority of a judging pass, where the scheduler goes by priorities: lower ones go first."""


@dataclass
class Answer:
    """One sequence that a drawn request generates: A tokens so far."""

    token_ids: list[int] = field(default_factory=list)
    """[A]."""
    likeliest: list[int] = field(default_factory=list)
    """[A] the likeliest token by the raw logits of the depth at which each was generated."""


@dataclass(kw_only=True)
class Drawn:
    """A request that was drawn, and what it generated."""

    prompt_ids: list[int]
    samples: int
    """n of the request."""
    thresholds: Thresholds
    cache_salt: str | None
    """The request's own: what it shares with others, its judging pass may share."""
    lora_request: Any
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Under which the worker traces its depths for us."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """By the index of the sample."""

    def note(self, output: Any, *, delta: bool, asked: int | None) -> None:
        """Takes what vLLM's `RequestOutput` tells, and leaves in it what the client asked for.

        Args:
            output: with log-probabilities, of at least the likeliest token.
            delta: it holds what is new, not all there is.
            asked: log-probabilities that the client asked for; None: none.
        """
        for one in output.outputs:
            answer = self.answers.setdefault(one.index, Answer())
            if not delta:
                answer.token_ids, answer.likeliest = [], []
            answer.token_ids += one.token_ids
            answer.likeliest += [likeliest(entry) for entry in one.logprobs or ()]
            if asked is None:
                one.logprobs = one.cumulative_logprob = None
            elif asked == 0 and one.logprobs is not None:
                pairs = zip(one.token_ids, one.logprobs, strict=False)
                one.logprobs = [{token: entry[token]} for token, entry in pairs]


def likeliest(entry: Mapping[int, Any]) -> int:
    """The token of the first rank among vLLM's log-probabilities at one place."""
    return min(entry, key=lambda token: int(entry[token].rank))


class Shadow:
    """Draws requests, follows them, and has full depth judge what they generated."""

    def __init__(
        self,
        engine: Any,
        rules: ExitRules,
        rate: float,
        metrics: ShadowMetrics,
        take_traces: Callable[[str], Awaitable[dict[str, Depths]]],
        *,
        capacity: int = CAPACITY,
    ) -> None:
        """Prepares; nothing is drawn before `generate` stands in for the engine's.

        Args:
            engine: vLLM's engine client.
            rules: the server's.
            rate: the share of requests that is drawn, of those that may exit by confidence.
            metrics: takes the outcome.
            take_traces: asks the worker for the depths recorded under a key.
            capacity: requests that may wait to be judged.
        """
        self._engine = engine
        self._generate = engine.generate
        self._rules = rules
        self._calibrated = rules.policy_or_off({"exit_threshold": AUTO}, structured=False)
        self._rate = rate
        self._metrics = metrics
        self._take_traces = take_traces
        self._ended: asyncio.Queue[Drawn] = asyncio.Queue(capacity)
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes the place of the engine's `generate`, the way of all routes' requests."""
        self._task = asyncio.create_task(self._run())
        self._engine.generate = self.generate

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """vLLM's `AsyncLLM.generate`, with the same arguments and results."""
        drawn = self._draw(prompt, sampling_params, options)
        if drawn is None:
            outputs: AsyncGenerator[Any, None] = self._generate(
                prompt, sampling_params, request_id, **options
            )
            return outputs
        asked, delta = sampling_params.logprobs, sampling_params.output_kind
        sampling_params = told(sampling_params, drawn.key)
        outputs = self._generate(prompt, sampling_params, request_id, **options)
        return self._follow(drawn, outputs, delta=delta == RequestOutputKind.DELTA, asked=asked)

    def _draw(self, prompt: Any, params: Any, options: Mapping[str, Any]) -> Drawn | None:
        """The request as one that will be judged; None if it was not drawn."""
        policy = self._rules.policy_or_off(
            params.extra_args, structured=params.structured_outputs is not None
        )
        may_exit = policy.mode in CALIBRATED_MODES and params.max_tokens != 1
        # Under a grammar the likeliest token is the likeliest of those allowed, which full depth
        # does not know. Chosen tokens' log-probabilities leave no room for the likeliest one.
        is_free = params.structured_outputs is None and params.logprob_token_ids is None
        has_ids = isinstance(prompt, Mapping) and prompt.get("type") == "token"
        if not (may_exit and is_free and has_ids) or random.random() >= self._rate:
            return None
        return Drawn(
            prompt_ids=list(prompt["prompt_token_ids"]),
            samples=params.n,
            thresholds="calibrated" if policy == self._calibrated else "other",
            cache_salt=prompt.get("cache_salt"),
            lora_request=options.get("lora_request"),
        )

    async def _follow(
        self, drawn: Drawn, outputs: AsyncGenerator[Any, None], *, delta: bool, asked: int | None
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    drawn.note(output, delta=delta, asked=asked)
                    yield output
            finally:  # also where the client hung up
                if any(answer.token_ids for answer in drawn.answers.values()):
                    self._hand_over(drawn)

    def _hand_over(self, drawn: Drawn) -> None:
        try:
            self._ended.put_nowait(drawn)
        except asyncio.QueueFull:
            self._metrics.dropped("queue_full")

    async def _run(self) -> None:
        """Judges what has ended, until the server's loop or its engine ends."""
        while True:
            drawn = await self._ended.get()
            try:
                await self._judge(drawn)
            except Exception as error:  # noqa: BLE001  # whatever it is, requests must go on
                if self._engine.errored:
                    return
                self._metrics.dropped("error")
                if not self._failed:
                    logger.warning("an answer could not be judged by full depth: %r", error)
                self._failed = True

    async def _judge(self, drawn: Drawn) -> None:
        traces = await self._take_traces(drawn.key)
        depths = {sample_index(name, drawn.samples): found for name, found in traces.items()}
        for index, answer in drawn.answers.items():
            if not depths.get(index, {}).keys() >= set(range(len(answer.token_ids))):
                self._metrics.dropped("no_trace")
                return
        for index, answer in drawn.answers.items():
            if not answer.token_ids:
                continue
            full_depth = await self._full_depth(drawn, answer.token_ids)
            tokens, agreed = Counter[int](), Counter[int]()
            pairs = zip(answer.likeliest, full_depth, strict=True)
            for place, (exits, full) in enumerate(pairs):
                depth = depths[index][place]
                tokens[depth] += 1
                agreed[depth] += exits == full
            for depth, count in tokens.items():
                self._metrics.judged(depth, drawn.thresholds, tokens=count, agreed=agreed[depth])

    async def _full_depth(self, drawn: Drawn, token_ids: Sequence[int]) -> list[int]:
        """The likeliest token at full depth at each place [A] of an answer, given those before.

        The answer's last token is left out of the prompt: what comes after the ones before it is
        the token that the pass generates itself. So the longest context has room for it.
        """
        prompt = tokens_input([*drawn.prompt_ids, *token_ids[:-1]], cache_salt=drawn.cache_salt)
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
            prompt, params, name, lora_request=drawn.lora_request, priority=LAST
        )
        (output,) = [one async for one in outputs]
        judged = output.prompt_logprobs[len(drawn.prompt_ids) :]
        return [*(likeliest(entry) for entry in judged), output.outputs[0].token_ids[0]]


def told(params: Any, key: str) -> Any:
    """Sampling parameters with which a request also tells its depths, and its likeliest tokens.

    Args:
        params: vLLM's, as they came; they stay as they are.
        key: under which depths are recorded, beside the client's own key.
    """
    changed = params.clone()
    fields = dict(params.extra_args or {})
    own = fields.get("exit_trace")
    fields["exit_trace"] = f"{own},{key}" if isinstance(own, str) else key
    changed.extra_args = fields
    changed.logprobs = params.logprobs or 1
    return changed


def sample_index(request_id: str, samples: int) -> int:
    """The index of the sequence that the engine's request generates; `samples` is n.

    vLLM puts "{index}_" before the names of requests that it makes out of one.
    """
    return int(request_id.partition("_")[0]) if samples > 1 else 0
