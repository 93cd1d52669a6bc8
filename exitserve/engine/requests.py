"""The record of a request, and which request sits in which row of vLLM's batch.

`Request` is all that the engine knows of one request: what it asked for, and what it did so far.
It outlives a preemption, since recomputed tokens must freeze where they did.

`Batch` follows runner V1's persistent batch, which names requests by row; `RequestSlots` follows
runner V2, which names them by slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from exitserve.engine.compat.sampling import Sampled
from exitserve.engine.pending_tokens import Bounds, PendingTokens
from exitserve.policy import DECIDED, EXACT, ExitPolicy, ExitRules

MOST_PREEMPTED = 4096
"""Records kept of requests that left the batch; should more be preempted, the oldest go."""


@dataclass(frozen=True)
class Exited:
    """A token that was decided ahead of the pass that samples it."""

    token: int
    depth: int
    """Layers that the token before it had run."""
    sampled: Sampled | None = None
    """None for one that is simply the likeliest."""


@dataclass(eq=False)
class Request:
    """One request: what it asked for, and what it did so far."""

    policy: ExitPolicy
    """What it asked for; full depth if its exits are disabled."""
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    """vLLM's own list of generated tokens, of which only the length is read (runner V1)."""
    trace_keys: tuple[str, ...] = ()
    """Under which its depths are kept for the caller; none: they are not kept."""
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens after which none follows."""
    name: str = ""
    """vLLM's internal request id; empty until the request's first pass."""
    depths: list[int] = field(default_factory=list)
    """Depth of each generated token, by its index."""
    pending: PendingTokens | None = None
    """Its tokens that wait at exit layers; None where none do."""
    drafts: list[int] = field(default_factory=list)
    """Tokens that the next pass is to judge (mode "verify"), or to run the deeper layers of."""
    decided: list[Exited] = field(default_factory=list)
    """The next tokens, as far as they are decided, not only drafted; the first are `drafts`."""
    drafts_from: int | None = None
    """Generated tokens from which on the next ones may be drafted; None: they may not."""
    has_seed: bool = False
    """Whether its tokens are drawn by a seed's random numbers."""
    is_sampled: bool = False
    """Whether exits decide its tokens, and these take vLLM's sampler: they are not simply the
    likeliest, or their log-probabilities are wanted."""
    wants_logprobs: bool = False
    """Whether it asked for log-probabilities of its tokens."""
    has_grammar: bool = False
    """Whether a grammar constrains its output."""
    exits_disabled: bool = False
    """Whether it asked for exits, and began while too many others ran (`--exits-up-to`)."""

    @property
    def freezes(self) -> bool:
        """Whether its tokens freeze where they exit."""
        return self.policy.mode not in EXACT

    @property
    def asks(self) -> bool:
        """Whether it asked for exits."""
        return self.policy.mode != "off" or self.exits_disabled

    @property
    def may_exit(self) -> bool:
        """Whether its tokens may exit, other than as drafts."""
        return self.policy.mode not in ("off", "verify")

    @property
    def may_draft(self) -> bool:
        """Whether its next tokens may be drafted."""
        return self.drafts_from is not None and len(self.output_ids) >= self.drafts_from

    @property
    def is_caught_up(self) -> bool:
        """Whether nothing of what exits decided waits: the next pass begins with a new token."""
        return not (self.drafts or self.decided) and (self.pending is None or self.pending.is_empty)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt, and what was generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has as many tokens as it asked for."""
        return 0 < self.max_tokens <= len(self.output_ids)

    def pass_over(self) -> None:
        """Forgets what was decided: the pass that it was decided for is over."""
        self.drafts, self.decided = [], []
        if self.pending is not None:
            self.pending.pass_over()

    def note_depth(self, index: int, depth: int, full_depth: int) -> None:
        """Keeps the depth of generated token `index`; tokens skipped before it ran full depth."""
        self.depths += [full_depth] * (index - len(self.depths))
        self.depths[index:] = [depth]


def policy_of(params: Any, rules: ExitRules) -> ExitPolicy:
    """The exit policy that vLLM's `SamplingParams` ask for.

    Bad fields were refused at the front door; one that slipped through means full depth, because
    an error here would stop the engine.
    """
    structured = params.structured_outputs is not None
    return rules.policy_or_off(params.extra_args, structured=structured)


def read_request(
    params: Any,
    prompt_ids: Sequence[int] | None,
    rules: ExitRules,
    *,
    output_ids: Sequence[int] = (),
    eos_ids: Sequence[int] = (),
    bounds: Bounds | None = None,
    name: str = "",
    running: int = 0,
) -> Request:
    """The record of a new request.

    Args:
        params: its `SamplingParams`.
        prompt_ids: its prompt; None for one given as embeddings, which runs at full depth.
        rules: the model's.
        output_ids: vLLM's list of its generated tokens.
        eos_ids: the model's ends of sequence.
        bounds: when tokens that wait at exit layers have to run (mode "defer").
        name: vLLM's internal id, where it is known.
        running: requests that will be in its batch, itself included; 0 for one that began before.
    """
    policy = ExitPolicy.off() if prompt_ids is None else policy_of(params, rules)
    asks = policy.mode != "off"
    given = (params.extra_args or {}).get("exit_trace")
    keys = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    disabled = asks and rules.exits_up_to is not None and running > rules.exits_up_to
    if disabled:
        policy = ExitPolicy.off()
    drafts_from, pending = _drafts_from(params, policy), None
    if policy.mode in ("defer", "verify"):
        pending = PendingTokens(bounds or Bounds())
    elif policy.mode == "confidence" and rules.num_drafts:
        pending = PendingTokens(Bounds(), freezes=True)
    ends = [] if params.ignore_eos else eos_ids
    return Request(
        policy=policy,
        prompt_ids=() if prompt_ids is None else prompt_ids,
        output_ids=output_ids,
        trace_keys=keys,
        max_tokens=params.max_tokens or 0,
        stop_ids=frozenset([*ends, *(params.stop_token_ids or ())]),
        name=name,
        pending=pending,
        drafts_from=None if policy.mode == "off" else drafts_from,
        has_seed=_has_seed(params),
        is_sampled=policy.mode in DECIDED and _is_sampled(params),
        wants_logprobs=params.logprobs is not None,
        has_grammar=params.structured_outputs is not None,
        exits_disabled=disabled,
    )


def _drafts_from(params: Any, policy: ExitPolicy) -> int | None:
    """See `Request.drafts_from`.

    Grammars are in the engine's process, vLLM counts tokens towards a least number and a thinking
    budget once in each pass, and has no log-probabilities of given tokens (`logprob_token_ids`)
    beside drafts. In mode "verify" vLLM's rejection sampling judges drafts, which knows neither
    `min_p` nor `logit_bias`, and would use up a seed's numbers: how many are judged depends on
    others, on who is preempted, and on a pass's tokens.
    """
    if policy.mode == "verify":
        biased = params.logit_bias or (params.min_p and params.temperature > 0)
        return None if biased or _has_seed(params) else 0
    told = params.structured_outputs, params.thinking_token_budget, params.logprob_token_ids
    if policy.mode not in DECIDED or any(told):
        return None
    return params.min_tokens + 1 if params.min_tokens else 0


def _has_seed(params: Any) -> bool:
    """See `Request.has_seed`."""
    return params.seed is not None and params.temperature > 0


def _is_sampled(params: Any) -> bool:
    """See `Request.is_sampled`."""
    told = (
        *(params.temperature, params.logit_bias, params.bad_words, params.allowed_token_ids),
        *(params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1),
    )
    return any(told) or params.logprobs is not None


class PreemptedRequests:
    """Records of requests that left the batch and may come back, the longest gone first."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Request] = OrderedDict()
        self.may_return: Callable[[str], bool] = lambda _: True
        """Whether a request that left the batch has not ended, as far as the runner can tell."""

    def keep(self, request: Request) -> None:
        """Keeps the record of a request that left, unless it has ended."""
        self._forget_ended()
        if self.may_return(request.name):
            self._by_name[request.name] = request
        if len(self._by_name) > MOST_PREEMPTED:
            self._by_name.popitem(last=False)

    def take(self, name: str) -> Request | None:
        """The record of a request that is back; None for a new one."""
        return self._by_name.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Drops the records of requests that have ended."""
        for name in names:
            self._by_name.pop(name, None)

    def requests(self) -> list[Request]:
        """All that are kept."""
        self._forget_ended()
        return list(self._by_name.values())

    def _forget_ended(self) -> None:
        """Drops those that were aborted meanwhile: they are in no batch that would tell."""
        self.forget([name for name in self._by_name if not self.may_return(name)])


class RequestSlots:
    """Runner V2's requests, by slot."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Request] = {}
        self.preempted = PreemptedRequests()

    def add(self, slot: int, request: Request) -> tuple[Request, bool]:
        """Takes a request into a slot.

        Returns:
            Its record, the earlier one if it was preempted, and whether it was.
        """
        earlier = self.preempted.take(request.name)
        self._by_slot[slot] = request if earlier is None else earlier
        return self._by_slot[slot], earlier is not None

    def remove(self, name: str) -> tuple[int, Request] | None:
        """Lets a request go, which has ended or is preempted; returns where it was, and it."""
        for slot, request in self._by_slot.items():
            if request.name == name:
                del self._by_slot[slot]
                self.preempted.keep(request)
                return slot, request
        return None

    def forget(self, names: Iterable[str]) -> None:
        """Drops what is kept of requests that have ended, also while they were preempted."""
        self.preempted.forget(names)

    def __len__(self) -> int:
        return len(self._by_slot)

    def get(self, slot: int, name: str) -> Request | None:
        """The request in a slot; None where it has another name, as in warm-ups."""
        request = self._by_slot.get(slot)
        return request if request is not None and request.name == name else None


class Batch:
    """Runner V1's batch: requests by row."""

    def __init__(self, rules: ExitRules, eos_ids: Sequence[int], bounds: Bounds) -> None:
        """Starts empty.

        Args:
            rules: the model's.
            eos_ids: the model's ends of sequence.
            bounds: see `read_request`.
        """
        self._rules, self._eos_ids, self._bounds = rules, eos_ids, bounds
        self.rows: dict[int, Request] = {}
        self.is_traced = False
        """Whether somebody asks for the depths of one of them."""
        self.verifies = False
        """Whether one of them, or of those that are preempted or wait, is in mode "verify"."""
        self.preempted = PreemptedRequests()
        # Set by the worker once it is up (`exitserve.engine.hooks.worker_extension`).
        self.request_ids: Callable[[], list[str]] | None = None
        """vLLM's internal request ids, in row order."""

    def update(self, changes: BatchUpdate) -> None:
        """Follows vLLM: removed, then added, then moved rows."""
        for index in changes.removed:
            self._remove(index)
        # One that ended is not among the removed if another takes its row.
        running = len(self.rows.keys() | {index for index, *_ in changes.added})
        for index, params, prompt_ids, output_ids in changes.added:
            self._remove(index)
            self.rows[index] = read_request(
                params,
                prompt_ids,
                self._rules,
                output_ids=output_ids,
                eos_ids=self._eos_ids,
                bounds=self._bounds,
                # One that has begun is back, and has a record (`named`).
                running=0 if output_ids else running,
            )
        for source, target, direction in changes.moved:
            moved = self.rows.pop(source, None)
            if direction == MoveDirectionality.SWAP and target in self.rows:
                self.rows[source] = self.rows.pop(target)
            self._remove(target)
            if moved is not None:
                self.rows[target] = moved
        self.is_traced = any(one.trace_keys for one in self.rows.values())
        every = (*self.rows.values(), *self.preempted.requests())
        self.verifies = any(one.policy.mode == "verify" for one in every)

    def _remove(self, index: int) -> None:
        """Empties a row, and keeps its request's record if it may come back."""
        request = self.rows.pop(index, None)
        if request is not None and request.name:
            self.preempted.keep(request)

    def named(self, index: int) -> Request:
        """The request in a row, its name known: with its earlier record if it was preempted.

        To be called during a pass: when vLLM adds a row, its request's name is not known yet.
        """
        request = self.rows[index]
        if request.name or self.request_ids is None:
            return request
        name = self.request_ids()[index]
        earlier = self.preempted.take(name)
        if earlier is not None:
            earlier.output_ids = request.output_ids
            request = self.rows[index] = earlier
        request.name = name
        return request

    def num_pending(self) -> int:
        """Tokens that wait at exit layers, of all requests."""
        every = (*self.rows.values(), *self.preempted.requests())
        # vLLM takes a request that has ended out of the batch with its next pass.
        waits = (one for one in every if not one.has_all_tokens)
        return sum(len(one.pending) for one in waits if one.pending is not None)
