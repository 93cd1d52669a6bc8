"""The forward pass of multi-exit training: losses computed inside the model's own `forward`.

Inside, because that is where sharded training (FSDP) has the norm, head and embeddings whole,
and where data parallelism expects the work: `model(input_ids=..., exit_pass=...)` returns losses
instead of logits. Without `exit_pass` the model behaves as it did.

Hidden states are taken, and positions frozen, by hooks on the decoder layers that stay for the
whole run: with gradient checkpointing a layer runs again in backward, and must do the same again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exitserve_training.losses import Head, layer_cross_entropy
from exitserve_training.losses.chunked import IGNORED
from exitserve_training.masking import Masking
from exitserve_training.objectives import Batch, Metrics, Objectives
from exitserve_training.parts import ModelParts
from exitserve_training.skipping import Skipping, SkipPlan

AUXILIARY = "exit_objectives"
"""Attribute of the model under which the objectives' own parameters live while it is trained."""


@dataclass(frozen=True)
class ExitPass:
    """Asks the model for losses instead of logits."""

    step: int
    total_steps: int = 1
    job: Literal["train", "evaluate"] = "train"


@dataclass(frozen=True)
class Quality:
    """What evaluation finds in one batch."""

    losses: dict[int, Tensor]
    """Depth to mean cross-entropy, nats per token."""
    tokens: Tensor
    """How many tokens that mean is over."""
    metrics: Metrics
    """Of the objectives."""


def shifted_labels(input_ids: Tensor, mask: Tensor) -> Tensor:
    """The next token of each position [B, T]; -100 where position or next is no token of `mask`."""
    last = torch.full_like(input_ids[:, :1], IGNORED)
    following = torch.cat([torch.where(mask, input_ids, IGNORED)[:, 1:], last], dim=1)
    return torch.where(mask, following, IGNORED)


class MultiExitForward:
    """Makes a model answer `model(..., exit_pass=...)`, and keeps what that needs."""

    def __init__(
        self,
        model: PreTrainedModel,
        parts: ModelParts,
        objectives: Objectives,
        eval_layers: tuple[int, ...],
        skipping: Skipping | None = None,
        masking: Masking | None = None,
    ) -> None:
        """Installs hooks and the forward on `model`, and the objectives as a part of it.

        Args:
            model: the language model itself, not a wrapper around it.
            parts: its layers, norm and head.
            objectives: what to minimise.
            eval_layers: depths to evaluate.
            skipping: who skips layers in training; None for nobody.
            masking: hides tokens; for models that are not causal.
        """
        self.model = model
        self.parts = parts
        self.objectives = objectives
        self.eval_layers = eval_layers
        self.skipping = skipping
        self.masking = masking
        self._wanted: frozenset[int] = frozenset()
        self._captured: dict[int, Tensor] = {}
        self._plan: SkipPlan | None = None
        model.add_module(AUXILIARY, objectives)
        self._hooks = [
            layer.register_forward_hook(functools.partial(self._after, depth), with_kwargs=True)
            for depth, layer in enumerate(parts.layers, start=1)
        ]
        self._original = original = model.forward
        self._was_replaced = "forward" in vars(model)

        @functools.wraps(original)
        def forward(*args: Any, exit_pass: ExitPass | None = None, **kwargs: Any) -> Any:
            if exit_pass is None:
                # The plan outlives its pass, for layers that run again in backward.
                self._plan = None
                return original(*args, **kwargs)
            return self._losses(exit_pass, **kwargs)

        model.forward = forward

    def remove(self) -> None:
        """Gives the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        if self._was_replaced:
            self.model.forward = self._original
        else:
            vars(self.model).pop("forward", None)
        delattr(self.model, AUXILIARY)

    @property
    def head(self) -> Head:
        """The shared norm and head."""
        return self.parts.head

    def _losses(
        self,
        request: ExitPass,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Metrics] | Quality:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None and attention_mask.dim() == 2:
            mask = attention_mask.bool()
        training = request.job == "train"
        self._captured, self._plan = {}, None
        if self.masking is not None:
            # Evaluation hides the same tokens whenever it runs.
            step = request.step if training else 0
            input_ids, labels = self.masking(step, input_ids, mask)
        else:
            labels = shifted_labels(input_ids if labels is None else labels, mask)
            kwargs["use_cache"] = False
        if training:
            self._wanted = frozenset(self.objectives.layers(request.step))
            if self.skipping is not None:
                self._plan = self.skipping.plan(
                    request.step, request.total_steps, input_ids, labels, mask
                )
        else:
            measured = self.objectives.measured_layers(request.step)
            self._wanted = frozenset(measured.union(self.eval_layers))
        # PEFT names every argument of a forward, with None where nothing was given.
        given = {name: value for name, value in kwargs.items() if value is not None}
        self.parts.body(input_ids=input_ids, attention_mask=attention_mask, **given)
        hidden, self._captured = self._captured, {}
        self._wanted = frozenset()
        batch = self._batch(request.step, hidden, labels, mask)
        if training:
            loss, metrics = self.objectives(batch)
            return loss, metrics if self._plan is None else {**metrics, **self._plan.metrics()}
        return self._quality(batch)

    def _batch(self, step: int, hidden: dict[int, Tensor], labels: Tensor, mask: Tensor) -> Batch:
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        return Batch(
            step=step,
            hidden=hidden,
            labels=labels,
            mask=mask,
            classifier=self.head,
            norm=self.parts.norm,
            embed=embedding,
            vocab_size=self.model.config.vocab_size,
            depth=None if self._plan is None else self._plan.depth,
        )

    def _quality(self, batch: Batch) -> Quality:
        own = self.objectives.classifiers()
        losses: dict[int, Tensor] = {}
        for layer in self.eval_layers:
            states = {layer: batch.hidden[layer]}
            losses |= layer_cross_entropy(states, own.get(layer, self.head), batch.labels)
        tokens = (batch.labels != IGNORED).sum()
        return Quality(losses, tokens, self.objectives.measure(batch))

    def _after(
        self, depth: int, _layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After layer `depth`: positions that skip it get back what came in."""
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if self._plan is not None:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            hidden = torch.where(self._plan.skips(depth)[..., None], before, hidden)
            self._plan.saw(depth, hidden, self.head)
        if depth in self._wanted:
            self._captured[depth] = hidden
        if self._plan is None:
            return None
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
