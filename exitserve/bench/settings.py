"""The job of a comparison with plain vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitserve.arguments import drafting_options
from exitserve.checkpoint.calibration import FREQUENT
from exitserve.errors import ExitServeError
from exitserve.policy import EXACT, ExitRules
from exitserve.settings import Setting

GPU_SHARE = 0.92
"""Of a GPU's memory, for all engines together: vLLM's default for one."""


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What a comparison was asked to do, checked."""

    model_dir: Path
    model_name: str
    rules: ExitRules
    settings: tuple[Setting, ...]
    """Plain vLLM first."""
    batch_sizes: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; at least as many as the largest batch."""
    requests: int
    """Requests of a pass; only full batches are sent, at least one."""
    prompt_source: str
    max_tokens: int
    repeats: int
    seconds: float
    """Decoding in each timed pass, at least: a pass of few steps is repeated until then."""
    dtype: str
    enforce_eager: bool
    max_model_len: int | None
    gpu_memory_utilization: float = GPU_SHARE
    """Share of a GPU's memory for all engines together."""
    exit_rows: str = FREQUENT
    """As in `exitserve serve`."""
    num_drafts: int | None = None
    """Tokens that requests may draft at a time; None: as many as pay, by the size of the batch."""
    rivals: tuple[str, ...] = ()
    """Other kinds of drafts on plain vLLM, see `exitserve.bench.rivals`."""
    synthetic: bool = False
    """Whether weights and prompts are random (`benchmarks/synthetic.py`)."""
    forced: Mapping[str, float] | None = None
    """Probabilities that checks pass and drafts are accepted, instead of what the model says."""

    def engine_options(self, *, drafting: bool) -> dict[str, Any]:
        """Exit options of an engine, one that drafts or one that does not."""
        own = draft_layers(self.rules, self.settings) if drafting else self.rules.exit_layers
        options: dict[str, Any] = {"exit_layers": list(own), "exit_rows": self.exit_rows}
        return options | (drafting_options(self.num_drafts) if drafting else {"mode": "off"})

    def requests_in_pass(self, batch_size: int) -> int:
        """How many requests a pass sends at a batch size: full batches, at least one."""
        return max(1, self.requests // batch_size) * batch_size


def draft_layers(rules: ExitRules, settings: Sequence[Setting]) -> tuple[int, ...]:
    """The exit layer at which an engine drafts for all settings of modes that draft.

    Raises:
        ExitServeError: they draft at different ones.
    """
    policies = [one.policy(rules) for one in settings if one.mode in EXACT]
    found = {policy.first_exit(rules.exit_layers) for policy in policies} - {None}
    if len(found) > 1:
        raise ExitServeError(
            f"these thresholds draft at different exit layers, {', '.join(map(str, found))}, and a "
            "server drafts at one: compare them in several runs."
        )
    return tuple(one for one in found if one is not None)


def rotated(settings: Sequence[Setting], repeat: int) -> list[Setting]:
    """The order of one repeat: rotated, so that each setting goes first equally often."""
    shift = repeat % len(settings)
    return [*settings[shift:], *settings[:shift]]
