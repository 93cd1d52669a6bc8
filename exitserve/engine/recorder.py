"""What happened to tokens: counts by depth, checks, and per-request traces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from exitserve.errors import ExitServeError, shown

MAX_TRACES = 4096
MAX_TRACED_TOKENS = 1_000_000
"""Traces and their tokens (120 bytes each) that are kept for collection: nobody comes for those of
clients that hung up.

Those go first that have not grown for longest: a request that runs adds to its own in every step.
"""
MOST_TRACE_KEYS = 4
"""Keys under which the depths of one request may be kept."""
LONGEST_KEY = 128
"""Characters of such a key."""
NOT_A_TRACE = "exit_trace must be true or false, not {}."


Traces = OrderedDict[str, dict[str, dict[int, tuple[int, str]]]]
"""By key, then by request id, then by index of a generated token, its depth and the source of the
draft that it was, empty for none; the longest untouched first."""


class TraceKeys(tuple[str, ...]):
    """Keys that the server made, under which it keeps the depths of a request.

    No request body turns into one, whatever the route: JSON knows only lists. So no client can name
    the trace of another request, nor fill the place of other traces.
    """


def check_trace(value: Any, *, of_client: bool) -> None:
    """Raises `ExitServeError` unless a request's `exit_trace` may have this value.

    From Python it may also be a short list of keys (strings) under which the trace is kept; a
    client over HTTP may not name any.
    """
    keys = isinstance(value, list | tuple) and all(isinstance(key, str) for key in value)
    if keys and (len(value) > MOST_TRACE_KEYS or max(map(len, value), default=0) > LONGEST_KEY):
        raise ExitServeError(
            f"exit_trace may have at most {MOST_TRACE_KEYS} keys of at most {LONGEST_KEY} "
            f"characters each, not {shown(value)}."
        )
    ours = keys and (isinstance(value, TraceKeys) or not of_client)
    if not (value is None or ours or (isinstance(value, int) and value in (0, 1))):
        raise ExitServeError(NOT_A_TRACE.format(shown(value)))


class Recorder:
    """Counts of one engine since its start, kept where the forward pass runs."""

    def __init__(self, num_layers: int, exit_layers: tuple[int, ...]) -> None:
        self.num_layers = num_layers
        self.exit_layers = exit_layers
        self.tokens_by_depth = [0] * (num_layers + 1)
        """Generated tokens that stopped at each depth."""
        self.checks = dict.fromkeys(exit_layers, 0)
        self.passed = dict.fromkeys(exit_layers, 0)
        self.head_passes = 0
        """Times the exit rows of the LM head were read, for checks and drafts."""
        self.frozen_tokens = 0
        """Whose remaining keys and values are propagated."""
        self.deferred_layers = 0
        """Run beyond the depth of tokens (mode "defer"), or for drafts that were rejected."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafted_from_text = 0
        """Of these drafts, those of the requests' own text; the others are the first layers'."""
        self.accepted_from_text = 0
        self.layer_reads = 0
        """Layers whose weights were read, each once for all tokens that ran it together."""
        self.final_heads = 0
        """Times the whole LM head was read for the sampler."""
        self._traces: Traces = OrderedDict()
        self._traced_tokens = 0

    def count_checks(self, layer: int, checks: int, passed: int) -> None:
        """Counts one exit check over `checks` tokens of which `passed` exited."""
        self.head_passes += 1
        self.checks[layer] += checks
        self.passed[layer] += passed

    def count_judged(self, drafts: int, accepted: int, *, from_text: bool) -> None:
        """Counts drafts of one request that a pass judged, and those that it accepted."""
        self.drafted_tokens += drafts
        self.accepted_tokens += accepted
        if from_text:
            self.drafted_from_text += drafts
            self.accepted_from_text += accepted
        self.deferred_layers += (drafts - accepted) * self.num_layers

    def trace(
        self, keys: Sequence[str], request_id: str, index: int, depth: int, source: str = ""
    ) -> None:
        """Keeps the depth of generated token `index` of a request, and the source of the draft that
        it was, under each of `keys`."""
        for one in keys:
            found = self._traces.setdefault(one, {}).setdefault(request_id, {})
            self._traced_tokens += index not in found
            found[index] = depth, source
            self._traces.move_to_end(one)
        while len(self._traces) > MAX_TRACES or self._traced_tokens > MAX_TRACED_TOKENS:
            self.take_traces(next(iter(self._traces)))

    def take_traces(self, key: str) -> dict[str, dict[int, tuple[int, str]]]:
        """Removes and returns what was traced under `key` since the last call.

        Returns:
            Request id to index of a generated token to its depth and source.
        """
        found = self._traces.pop(key, {})
        self._traced_tokens -= sum(map(len, found.values()))
        return found

    def snapshot(self) -> dict[str, Any]:
        """All counts, as plain JSON-ready values."""
        counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return counts | {
            "exit_layers": list(self.exit_layers),
            "tokens_by_depth": dict(enumerate(self.tokens_by_depth[1:], start=1)),
            "checks": dict(self.checks),
            "passed": dict(self.passed),
        }
