"""The job of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exitserve.policy import ExitPolicy, ExitRules
from exitserve.settings import Setting
from exitserve.windows import Documents

TRACED_TOKENS = 64
"""Most tokens of an answer that is traced."""
SEED = 0
"""Of the choice of windows."""


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """What an evaluation was asked to do, checked."""

    model: str
    """As it was given: a directory or a hub id."""
    directory: Path
    """Its files."""
    rules: ExitRules
    exit_rows: str
    settings: tuple[Setting, ...]
    """Full depth first."""
    documents: Documents | None
    """Held-out text, if quality is to be measured."""
    window: int
    """Tokens of a window."""
    prompt_tokens: int
    """How many of them are the prompt, at full depth."""
    windows: int
    """Most windows."""
    prompt: str | None
    """A text to continue, for traces."""

    @property
    def policies(self) -> tuple[ExitPolicy, ...]:
        """Of each setting, as a server that drafts would have it."""
        layers = self.rules.exit_layers
        return tuple(one.policy(self.rules).drafting(layers) for one in self.settings)
