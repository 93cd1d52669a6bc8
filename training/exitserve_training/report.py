"""The training report: `report.json` for programs, `report.md` for people."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from exitserve.checkpoint.block import TrainedExit
from exitserve.reporting.report import markdown_page, markdown_table, terminal_table
from exitserve_training.parts import Task

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LayerQuality:
    """How well one depth predicts the held-out text."""

    loss: float
    """Mean cross-entropy, nats per token (or per input of a classifier)."""
    perplexity: float
    accuracy: float
    """Share of tokens, or of inputs, whose most likely token or class is the right one."""


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """What a training run achieved; the keys of `report.json` are these fields."""

    model: str
    """The checkpoint's folder."""
    architecture: str
    parameters: int
    objectives: list[str]
    num_layers: int
    exit_layers: list[int]
    layers: dict[str, LayerQuality]
    """By depth: every exit layer, and the last layer."""
    last_layer: LayerQuality
    exits: dict[str, TrainedExit]
    """By exit layer, whether it can be used, as in the checkpoint's `multi_exit` block."""
    initial_layers: dict[str, LayerQuality]
    """The same before training; empty for a resumed run."""
    steps: int
    tokens_seen: int
    """0 for images, which have none."""
    seconds: float
    """Training time over all sessions, evaluation during training included."""
    train_tokens: int
    """Targets of one epoch: tokens (all of them, when masking), or rows of a classifier."""
    validation_tokens: int
    says: Task = "next token"
    metrics: dict[str, float] = field(default_factory=dict)
    """What the objectives measured on the held-out text, by name."""
    schema_version: int = SCHEMA_VERSION
    kind: str = "training"

    def write(self, folder: Path) -> None:
        """Writes `report.json` and `report.md` into `folder`."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / "report.json").write_text(text, encoding="utf-8")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report as a page."""
        measured = [[name, f"{value:.4g}"] for name, value in self.metrics.items()]
        return markdown_page(
            f"# Training report: {self.model}",
            f"{self.architecture}, {self.parameters:,} parameters, {self.num_layers} layers, "
            f"objectives `{', '.join(self.objectives)}`. {self.steps:,} steps, "
            f"{self.tokens_seen:,} tokens, {self.seconds:,.0f} s. "
            f"Held out: {self.validation_tokens:,} {self._unit}s.",
            self.quality_table(),
            markdown_table(["measured on the held-out text", ""], measured) if measured else "",
        )

    def quality_table(self) -> str:
        """The quality at each depth, in Markdown."""
        return markdown_table(self._headers(), self._rows())

    def table(self) -> Table:
        """The report as a short table for the terminal."""
        title = f"held out: {self.validation_tokens:,} {self._unit}s"
        return terminal_table(title, self._headers(), self._rows())

    @property
    def _unit(self) -> str:
        """What the targets are."""
        return "row" if self.says == "class" else "token"

    def _headers(self) -> list[str]:
        before = "before\ntraining"
        perplexity = [] if self.says == "class" else ["perplexity", before]
        loss = f"loss\n(nats/{self._unit})"
        return ["depth", loss, *perplexity, "accuracy", before, "agrees with\nfull depth"]

    def _rows(self) -> list[list[str]]:
        rows = []
        for depth, after in self.layers.items():
            before = self.initial_layers.get(depth)
            row = [f"{depth} of {self.num_layers}", f"{after.loss:.4f}"]
            if self.says != "class":
                row += _both(after.perplexity, before.perplexity if before else None, ".4g")
            row += _both(after.accuracy, before.accuracy if before else None, ".1%")
            found = self.exits.get(depth)
            rows.append([*row, "" if found is None else f"{found.agreement:.1%}"])
        return rows


def _both(after: float | None, before: float | None, form: str) -> list[str]:
    """Two cells; empty where there is no number."""
    return ["" if value is None else format(value, form) for value in (after, before)]
