"""The forward pass of multi-exit training: losses computed inside the model's own `forward`.

Inside, because that is where sharded training (FSDP) has the norm, head and embeddings whole,
and where data parallelism expects the work: `model(input_ids=..., exit_pass=...)` returns losses
instead of logits. Without `exit_pass` the model behaves as it did.

Hidden states are taken, and positions frozen, by hooks on the decoder layers that stay for the
whole run: with gradient checkpointing a layer runs again in backward, and must do the same again.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exitserve_training.losses.aligned import Predictions, predictions
from exitserve_training.objectives.objective import LossInputs, Metrics
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import ModelParts
from exitserve_training.routers import RouterBalance
from exitserve_training.skipping import SkippedPositions, SkipSampler
from exitserve_training.tasks import TaskBatch, TaskInputs, next_token
from exitserve_training.verdicts import above

AUXILIARY = "exit_objectives"
"""Attribute of the model under which the objectives' own parameters live while it is trained."""


@dataclass(frozen=True)
class ExitPass:
    """Given to a model's forward: it then returns losses instead of logits."""

    step: int
    total_steps: int = 1
    job: Literal["train", "evaluate"] = "train"


@dataclass(frozen=True)
class Quality:
    """What evaluation finds in one batch."""

    of_layers: Metrics
    """`loss_layer_<l>`: mean cross-entropy, nats per token, or per input of a classifier; and
    `accuracy_layer_<l>`: the share of positions whose most likely token or class is right."""
    tokens: Tensor
    """How many tokens or inputs those means are over."""
    metrics: Metrics
    """Of the objectives."""
    exits: Tensor
    """What `verdicts.above` counted of each exit, [exits, 2, thresholds]."""


class MultiExitForward:
    """Adds `model(..., exit_pass=...)` to a model, and holds what that needs."""

    def __init__(
        self,
        model: PreTrainedModel,
        parts: ModelParts,
        objectives: Objectives,
        eval_layers: tuple[int, ...],
        skipping: SkipSampler | None = None,
        task_inputs: TaskInputs = next_token,
        balance: RouterBalance | None = None,
    ) -> None:
        """Installs hooks and the forward on `model`, and the objectives as a part of it.

        Args:
            model: the model itself, not a wrapper around it.
            parts: its layers, norm and head.
            objectives: what to minimise.
            eval_layers: depths to evaluate.
            skipping: draws what skips layers in training; None for nothing.
            task_inputs: what the model predicts.
            balance: of a mixture of experts, what its routers are trained with in addition.
        """
        self.model = model
        self.parts = parts
        self.objectives = objectives
        self.eval_layers = eval_layers
        self.skipping = skipping
        self.task_inputs = task_inputs
        self.balance = balance
        self._wanted: frozenset[int] = frozenset()
        self._captured: dict[int, Tensor] = {}
        self._skipped: SkippedPositions | None = None
        model.add_module(AUXILIARY, objectives)
        self._hooks = [
            layer.register_forward_hook(
                functools.partial(self._after_layer, depth), with_kwargs=True
            )
            for depth, layer in enumerate(parts.layers, start=1)
        ]
        self._original = original = model.forward
        self._was_replaced = "forward" in vars(model)

        @functools.wraps(original)
        def forward(*args: Any, exit_pass: ExitPass | None = None, **kwargs: Any) -> Any:
            if exit_pass is None:
                # It outlives its pass, for layers that run again in backward.
                self._skipped = None
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

    def _losses(self, request: ExitPass, **given: Any) -> tuple[Tensor, Metrics] | Quality:
        training = request.job == "train"
        self._captured, self._skipped = {}, None
        # PEFT names every argument of a forward, with None where nothing was given.
        batch = {name: value for name, value in given.items() if value is not None}
        task_batch = self.task_inputs(request.step if training else None, batch)
        if training:
            self._wanted = frozenset(self.objectives.layers(request.step))
            self._skipped = self._draw_skipped(request, task_batch)
        else:
            measured = self.objectives.measured_layers(request.step)
            self._wanted = frozenset(measured.union(self.eval_layers))
        balance = self.balance if training else None
        asked: dict[str, bool] = {"use_cache": False} if self.parts.task == "next token" else {}
        if balance is not None:
            asked["output_router_logits"] = True
        output = self.parts.body(**task_batch.inputs, **asked)
        unbalanced = None if balance is None else balance.loss(output, task_batch.mask)
        # Its states behind the norm are no part of the losses.
        del output
        hidden, self._captured = self._captured, {}
        self._wanted = frozenset()
        loss_inputs = self._loss_inputs(request.step, hidden, task_batch)
        if training:
            loss, metrics = self.objectives(loss_inputs)
            if self._skipped is not None:
                metrics = {**metrics, **self._skipped.metrics()}
            if balance is not None and unbalanced is not None:
                loss = loss + balance.weight * unbalanced
                metrics = {**metrics, "router_loss": unbalanced.detach()}
            return loss, metrics
        return self._quality(loss_inputs)

    def _draw_skipped(self, request: ExitPass, task_batch: TaskBatch) -> SkippedPositions | None:
        """What skips layers in a training pass."""
        if self.skipping is None or self.parts.task == "class":
            return None
        return self.skipping.draw(
            request.step,
            request.total_steps,
            task_batch.inputs["input_ids"],
            task_batch.labels,
            task_batch.mask,
        )

    def _loss_inputs(
        self, step: int, hidden: dict[int, Tensor], task_batch: TaskBatch
    ) -> LossInputs:
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        return LossInputs(
            step=step,
            hidden=hidden,
            labels=task_batch.labels,
            mask=task_batch.mask,
            classifier=self.parts.head,
            norm=self.parts.norm,
            embed=embedding,
            depth=None if self._skipped is None else self._skipped.depth,
            inputs=task_batch.inputs,
        )

    def _quality(self, batch: LossInputs) -> Quality:
        own = self.objectives.classifiers()
        tokens = batch.labelled.sum()
        found: Metrics = {}
        said: dict[int, Predictions] = {}
        for layer in self.eval_layers:
            head = own.get(layer, self.parts.head)
            said[layer] = one = predictions(batch.hidden[layer], head, batch.labels)
            found[f"loss_layer_{layer}"] = one.nats.sum() / tokens.clamp(min=1)
            found[f"accuracy_layer_{layer}"] = one.right.sum() / tokens.clamp(min=1)
        *exits, last = (said[layer] for layer in self.eval_layers)
        counts = torch.stack([above(one, last.token) for one in (*exits, last)])
        return Quality(found, tokens, self.objectives.measure(batch), counts)

    def _after_layer(
        self, depth: int, _layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook after layer `depth`: positions that skip it get back what came in."""
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if self._skipped is not None:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            hidden = torch.where(self._skipped.skips(depth)[..., None], before, hidden)
            self._skipped.freeze_confident(depth, hidden, self.parts.head)
        if depth in self._wanted:
            self._captured[depth] = self.parts.predicting(hidden)
        if self._skipped is None:
            return None
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
