"""Plain and aligned cross-entropy, and the alternatives that the paper compares with.

All of the aligned-training paper: eq. 3, its alternation and cosine baseline (appendix C), and
the multi-exit model with a classifier per exit that figure 3 compares it with.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from exitserve_training.losses import (
    OutputHead,
    balanced_cross_entropy,
    cosine_alignment,
    kl_to_last,
    layer_weights,
    weighted_layer_cross_entropy,
    weighted_layer_squares,
)
from exitserve_training.losses.chunked import Classifier
from exitserve_training.objectives.aligned.options import (
    AlignedOptions,
    CosineAlignmentOptions,
    CrossEntropyOptions,
    KLToLastOptions,
    SeparateClassifiersOptions,
)
from exitserve_training.objectives.aligned.teacher import FrozenTeacher
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext


class CrossEntropy(Objective):
    """Cross-entropy of the last layer alone: ordinary training."""

    in_evaluation = False

    def __init__(self, options: CrossEntropyOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.num_layers = context.num_layers
        self.balanced = options.balanced

    def layers(self, step: int) -> Sequence[int]:
        """The last layer."""
        return (self.num_layers,)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        if self.balanced:
            logits = batch.classifier(batch.hidden[self.num_layers])
            loss = balanced_cross_entropy(logits, batch.labels)
            return loss, {"ce_loss": loss.detach()}
        loss, losses = _cross_entropy(batch, batch.classifier, {self.num_layers: 1.0})
        return loss, {**losses, "ce_loss": loss.detach()}


class Aligned(Objective):
    """The aligned loss (eq. 3) at the chosen layers.

    Minimising it alone costs the last layer some quality, so with `alternate` (the default, and
    what the paper's appendix C does) every second optimizer step, beginning with the second,
    minimises the last layer's plain cross-entropy instead.

    With `sample` = k, an aligned step reads k of the layers below the last, drawn anew by the
    seed and the step. Each weight is divided by the chance k / n of being drawn, so the expected
    loss is that of all n. The head then runs k + 1 times, whatever n.
    """

    in_evaluation = False

    def __init__(self, options: AlignedOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.num_layers = context.num_layers
        layers = options.layers_used(context.exit_layers, context.num_layers)
        scale = layer_weights(layers, options.weights)
        self.scale = dict(zip(layers, scale, strict=True))
        self.inner = [layer for layer in layers if layer != self.num_layers]
        self.alternate = options.alternate
        self.sample = options.sample
        self.seed = context.seed

    def layers(self, step: int) -> Sequence[int]:
        """The layers of this step: on a plain one, the last alone."""
        return tuple(self._scale(step))

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        loss, losses = _cross_entropy(batch, batch.classifier, self._scale(batch.step))
        name = "ce_loss" if self._is_plain(batch.step) else "aligned_loss"
        return loss, {**losses, name: loss.detach()}

    def _is_plain(self, step: int) -> bool:
        return self.alternate and step % 2 == 1

    def _scale(self, step: int) -> dict[int, float]:
        if self._is_plain(step):
            return {self.num_layers: 1.0}
        if self.sample is None or self.sample >= len(self.inner):
            return self.scale
        drawn = sorted(random.Random(f"{self.seed} {step}").sample(self.inner, self.sample))
        rarer = len(self.inner) / self.sample
        scale = {layer: rarer * self.scale[layer] for layer in drawn}
        return {**scale, self.num_layers: self.scale[self.num_layers]}


class SeparateClassifiers(Objective):
    """A norm and a linear head for each exit, besides the model's own: the multi-exit baseline.

    As DeeBERT and BERxiT do for encoders, with the weights of eq. 3 for comparison's sake. Heads
    begin as copies of the model's own norm and head. They cost D * V parameters an exit.
    """

    in_evaluation = False

    def __init__(self, options: SeparateClassifiersOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.num_layers = context.num_layers
        layers = options.layers_used(context.exit_layers, context.num_layers)
        scale = layer_weights(layers, options.weights)
        self.scale = dict(zip(layers, scale, strict=True))
        self.inner = [layer for layer in layers if layer != self.num_layers]
        self.heads = nn.ModuleDict({str(layer): _copied_head(context.head) for layer in self.inner})
        self.soft_cap = context.head.soft_cap

    def layers(self, step: int) -> Sequence[int]:
        """All its exits and the last layer; on a plain step, the last alone."""
        return (self.num_layers,) if self._is_plain(step) else tuple(self.scale)

    def classifiers(self) -> Mapping[int, Classifier]:
        """The exits' own heads."""
        return {layer: self._head(layer) for layer in self.inner}

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        last = self.num_layers
        if self._is_plain(batch.step):
            loss, metrics = _cross_entropy(batch, batch.classifier, {last: 1.0})
            return loss, {**metrics, "ce_loss": loss.detach()}
        loss, metrics = _cross_entropy(batch, batch.classifier, {last: self.scale[last]})
        for layer in self.inner:
            states = batch.hidden[layer]
            states = states.detach() if self.options.detach else states
            own = {layer: self.scale[layer]}
            part, found = _cross_entropy(batch, self._head(layer), own, {layer: states})
            loss, metrics = loss + part, {**metrics, **found}
        if self.options.kl > 0.0:
            divergence = self._divergence(batch)
            loss = loss + self.options.kl * divergence
            metrics["separate_classifiers_kl"] = divergence.detach()
        return loss, {**metrics, "separate_classifiers_loss": loss.detach()}

    def _is_plain(self, step: int) -> bool:
        return self.options.alternate and step % 2 == 1

    def _head(self, layer: int) -> OutputHead:
        own = self.heads[str(layer)]
        assert isinstance(own, nn.ModuleDict)
        return OutputHead(own["norm"], own["linear"], self.soft_cap)

    def _divergence(self, batch: LossInputs) -> Tensor:
        """Weighted KL(last || exit), each through its own head."""
        total = torch.zeros((), device=batch.labels.device)
        for layer in self.inner:
            states = batch.hidden[layer]
            states = states.detach() if self.options.detach else states
            divergence = kl_to_last(
                [states, batch.hidden[self.num_layers]],
                self._head(layer),
                teacher=batch.classifier,
                weights=[self.scale[layer], 0.0],
                temperature=self.options.temperature,
                mask=_labelled(batch, layer),
            )
            total = total + divergence
        return total


Options = TypeVar("Options", CosineAlignmentOptions, KLToLastOptions)


class _TowardsLast(Objective, Generic[Options]):
    """Turns chosen layers towards the last one, in every step."""

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.options: Options = options
        self.num_layers = context.num_layers
        self.chosen = options.layers_used(context.exit_layers, context.num_layers)

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`."""
        return self.chosen


class CosineAlignment(_TowardsLast[CosineAlignmentOptions]):
    """Turns the states of layers towards the last one's: L_sim of appendix C."""

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        loss = cosine_alignment(
            [batch.hidden.get(layer) for layer in range(1, self.num_layers + 1)],
            exit_layers=self.chosen,
            weights=self.options.weights,
            detach_last=self.options.detach_last,
            mask=batch.reached(self.num_layers),
        )
        return loss, {"cosine_alignment_loss": loss.detach()}


class KLToLast(_TowardsLast[KLToLastOptions]):
    """Turns what layers predict towards what the last one predicts, or a frozen teacher's."""

    def __init__(self, options: KLToLastOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        path = options.teacher_path(context.initial_model)
        self.teacher = None if path is None else FrozenTeacher(path)
        self.scale = layer_weights(self.chosen, options.weights)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        if self.teacher is not None:
            return self._from_teacher(batch, self.teacher)
        loss = kl_to_last(
            [batch.hidden.get(layer) for layer in range(1, self.num_layers + 1)],
            batch.classifier,
            exit_layers=self.chosen,
            weights=self.options.weights,
            temperature=self.options.temperature,
            mask=_labelled(batch, self.num_layers),
        )
        return loss, {"kl_to_last_loss": loss.detach()}

    def _from_teacher(self, batch: LossInputs, teacher: FrozenTeacher) -> tuple[Tensor, Metrics]:
        """The teacher's states stand behind those of all chosen layers, L among them."""
        loss = kl_to_last(
            [*(batch.hidden[layer] for layer in self.chosen), teacher.states(batch.inputs)],
            batch.classifier,
            weights=[*self.scale, 0.0],
            temperature=self.options.temperature,
            teacher=teacher.head,
            mask=_labelled(batch, self.num_layers),
        )
        return loss, {"kl_to_last_loss": loss.detach()}


def _cross_entropy(
    batch: LossInputs,
    classifier: Classifier,
    scale: Mapping[int, float],
    hidden: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, Metrics]:
    """The weighted sum over the layers of `scale`, and each layer's own as `loss_layer_<l>`.

    Of a regression it is the squared error instead.
    """
    states = batch.hidden if hidden is None else hidden
    if batch.labels.is_floating_point():
        chosen = {layer: states[layer] for layer in scale}
        loss, losses = weighted_layer_squares(chosen, classifier, batch.labels, scale)
        return loss, {f"loss_layer_{layer}": value for layer, value in losses.items()}
    loss, losses = weighted_layer_cross_entropy(
        {layer: states[layer] for layer in scale},
        classifier,
        batch.labels,
        scale,
        masks=None if batch.depth is None else {layer: batch.reached(layer) for layer in scale},
    )
    return loss, {f"loss_layer_{layer}": value for layer, value in losses.items()}


def _labelled(batch: LossInputs, layer: int) -> Tensor:
    """Bool [B, T]: positions with a label and a state of their own at `layer`."""
    return batch.reached(layer) & (batch.labels >= 0)


def _copied_head(head: OutputHead) -> nn.ModuleDict:
    """A norm and an untied linear map, beginning as the model's own."""
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy
    own = nn.ModuleDict({"norm": copied(head.norm), "linear": copied(head.linear)})
    # Of a model under LoRA everything is frozen, and so were the copies.
    return own.requires_grad_(True)
