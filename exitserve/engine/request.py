"""The record of a request: what it asked for, and what it did so far.

It outlives a preemption, since recomputed tokens must freeze where they did.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.sampling_params import SamplingType

from exitserve.costs.drafting import PRIOR, SAMPLED, Acceptance
from exitserve.engine.recorder import check_trace
from exitserve.errors import ExitServeError
from exitserve.policy import DRAFT_SOURCES, ExitPolicy, ExitRules

MOST_PREEMPTED = 4096
"""Records kept of requests that left the batch; should more be preempted, the oldest go."""


@dataclass(eq=False)
class Request:
    """All that the engine knows of one request."""

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
    has_seed: bool = False
    """Whether its tokens are drawn by a seed's random numbers."""
    draft_sources: tuple[str, ...] = DRAFT_SOURCES["both"]
    """Where its drafts may come from."""
    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    """Of its drafts, by their source."""
    needs_whole_head: bool = False
    """Whether a token that exits needs the logits of all tokens, not of the exit rows only."""
    exits_disabled: bool = False
    """Whether it asked for exits, and began while too many others ran (`--exits-up-to`)."""

    @property
    def asks(self) -> bool:
        """Whether it asked for exits."""
        return self.policy.mode != "off" or self.exits_disabled

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt, and what was generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    def note_depth(self, index: int, depth: int, full_depth: int) -> None:
        """Keeps the depth of generated token `index`; tokens skipped before it ran full depth."""
        self.depths += [full_depth] * (index - len(self.depths))
        self.depths[index:] = [depth]


class FieldCheck:
    """Checks the `exit_*` fields of every request on its way to the engine, by whatever route.

    vLLM asks the logits processors about parameters; those of both runners inherit this.
    """

    rules: ExitRules | None = None
    """Set on this class in the front-end process, once the model is known."""
    serves_clients = False
    """Set in a server, whose clients may ask for a trace but not name its keys."""

    @staticmethod
    def validate_params(sampling_params: Any) -> None:
        """Raises `ValueError` (HTTP 400) for bad fields."""
        fields, rules = sampling_params.extra_args or {}, FieldCheck.rules
        if rules is not None:
            rules.policy_for(fields)
            if rules.num_drafts and sampling_params.logprob_token_ids:
                raise ExitServeError(
                    "logprob_token_ids is not supported where the first layers draft (modes defer "
                    "and verify): vLLM's rejection sampling has no log-probabilities of given "
                    "tokens. Leave it out, or use a server of another --mode."
                )
        check_trace(fields.get("exit_trace"), of_client=FieldCheck.serves_clients)


def policy_of(params: Any, rules: ExitRules) -> ExitPolicy:
    """The exit policy that vLLM's `SamplingParams` ask for.

    Bad fields were refused at the front door; one that slipped through means full depth, because
    an error here would stop the engine.
    """
    structured = params.structured_outputs is not None
    return rules.policy_or_off(params.extra_args, structured=structured)


def needs_whole_head(params: Any, rules: ExitRules) -> bool:
    """Whether `SamplingParams` ask for more than the most likely token, so that a token that exits
    needs the logits of all tokens. Never where checks read the whole head."""
    if rules.rows_file is None:
        return False
    samples = params.sampling_type != SamplingType.GREEDY
    changed = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    reads = params.logprobs is not None or params.logprob_token_ids is not None
    limits = (
        params.structured_outputs,
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words,
        params.min_tokens,
        params.thinking_token_budget,
    )
    return rules.logits_processors or samples or reads or bool(changed) or any(limits)


def read_request(
    params: Any,
    prompt_ids: Sequence[int] | None,
    rules: ExitRules,
    *,
    output_ids: Sequence[int] = (),
    eos_ids: Sequence[int] = (),
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
        name: vLLM's internal id, where it is known.
        running: requests that will be in its batch, itself included; 0 for one that began before.
    """
    policy = ExitPolicy.off() if prompt_ids is None else policy_of(params, rules)
    most = rules.exits_up_to
    disabled = policy.mode != "off" and most is not None and running > most
    fields = params.extra_args or {}
    given = fields.get("exit_trace")
    keys = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    ends = [] if params.ignore_eos else eos_ids
    return Request(
        policy=ExitPolicy.off() if disabled else policy,
        prompt_ids=() if prompt_ids is None else prompt_ids,
        output_ids=output_ids,
        trace_keys=keys,
        max_tokens=params.max_tokens or 0,
        stop_ids=frozenset([*ends, *(params.stop_token_ids or ())]),
        name=name,
        draft_sources=DRAFT_SOURCES.get(str(fields.get("exit_drafts")), DRAFT_SOURCES["both"]),
        acceptance=defaultdict(partial(Acceptance, SAMPLED if params.temperature > 0 else PRIOR)),
        needs_whole_head=needs_whole_head(params, rules),
        has_seed=params.seed is not None and params.temperature > 0,
        exits_disabled=disabled,
    )


class PreemptedRequests:
    """Records of requests that left the batch and may come back, the longest gone first."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Request] = OrderedDict()
        self.may_return: Callable[[str], bool] = lambda _: True
        """Whether a request that left the batch has not ended, as far as the runner can tell."""

    def keep(self, request: Request) -> None:
        """Keeps the record of a request that left, unless it has ended."""
        # Those that were aborted meanwhile are in no batch that would tell.
        self.forget([name for name in self.names if not self.may_return(name)])
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

    @property
    def names(self) -> list[str]:
        """Of the requests whose records are kept."""
        return list(self._by_name)


class RunningRequests:
    """The requests of an engine, as the worker knows them."""

    def update_counts(self) -> None:
        """Brings the recorder's counts and traces up to date, for which a GPU's wait for it."""
