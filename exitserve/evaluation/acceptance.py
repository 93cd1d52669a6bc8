"""How many drafts full depth would accept, if the layers up to an exit drafted several at a time.

From one teacher-forced pass a text: at each position the exit's greedy token is full depth's or
not. A step that begins at a position drafts k tokens; those up to the first that differs are
accepted, full depth adds one, and the next step begins behind them. On text that people wrote the
drafts that follow are judged given the text, not given the drafts before them; where those were
accepted on the model's own greedy text, the two are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exitserve.agreement import exit_states
from exitserve.reference import Reference
from exitserve.windows import Window

DRAFTS = range(1, 9)
"""k for which acceptance is counted."""


@dataclass
class DraftTally:
    """Drafts of one exit layer."""

    agreeing: int = 0
    """Tokens that are full depth's, whoever drafted before them, ..."""
    tokens: int = 0
    """... of so many."""
    steps: dict[int, int] = field(default_factory=lambda: dict.fromkeys(DRAFTS, 0))
    """By k: steps made."""
    accepted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(DRAFTS, 0))

    def add(self, agrees: Sequence[bool]) -> None:
        """Adds a text, given which of its tokens [N] the exit has right."""
        self.tokens += len(agrees)
        self.agreeing += sum(agrees)
        for drafts in DRAFTS:
            for run in accepted_runs(agrees, drafts):
                self.steps[drafts] += 1
                self.accepted[drafts] += run

    def entries(self) -> list[dict[str, Any]]:
        """For the report, by k."""
        return [
            {
                "drafts": drafts,
                "accepted_per_step": round(self.accepted[drafts] / self.steps[drafts], 4),
                "tokens_per_step": round(1 + self.accepted[drafts] / self.steps[drafts], 4),
            }
            for drafts in DRAFTS
            if self.steps[drafts]
        ]


def accepted_runs(agrees: Sequence[bool], drafts: int) -> list[int]:
    """How many drafts each step accepts, of the steps that fit whole into a text.

    Args:
        agrees: [N] which tokens the exit has right.
        drafts: k of each step.
    """
    runs, start = [], 0
    while start + drafts < len(agrees):
        run = 0
        while run < drafts and agrees[start + run]:
            run += 1
        runs.append(run)
        start += run + 1
    return runs


def measure_drafts(
    reference: Reference,
    windows: Sequence[Window],
    prompt_tokens: int,
    progress: Callable[[], None],
) -> list[dict[str, Any]]:
    """Counts drafts on held-out text behind each window's prompt, for each exit layer.

    Returns:
        The report's `drafting`.
    """
    tallies = {layer: DraftTally() for layer in reference.exit_layers}
    for window in windows:
        states, final = exit_states(reference, window.token_ids, prompt_tokens)
        token = reference.parts.classify_normed(final).argmax(dim=-1)
        for layer, normed in states.items():
            found = reference.exit_tokens(reference.parts.classify_normed(normed))
            tallies[layer].add((found == token).tolist())
        progress()
    return [
        {
            "exit_layer": layer,
            "agreement": round(tally.agreeing / max(1, tally.tokens), 4),
            "steps": tally.entries(),
        }
        for layer, tally in tallies.items()
    ]
