"""Plain and aligned cross-entropy, and the alternatives that the paper compares with.

All of the aligned-training paper: eq. 3, its alternation and cosine baseline (appendix C), and
the multi-exit model with a classifier per exit that figure 3 compares it with.
"""

from __future__ import annotations

import copy
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from exitserve_training.losses import (
    OutputHead,
    Teacher,
    balanced_cross_entropy,
    cosine_alignment,
    kl_to_last,
    layer_weights,
    weighted_layer_cross_entropy,
    weighted_layer_squares,
)
from exitserve_training.losses.head import Classifier
from exitserve_training.objectives.aligned.options import (
    AlignedOptions,
    CosineAlignmentOptions,
    CrossEntropyOptions,
    KLToLastOptions,
    SeparateClassifiersOptions,
)
from exitserve_training.objectives.aligned.teacher import FrozenTeacher
from exitserve_training.objectives.head_objective import HeadObjective, HeadTerm
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext


class _LayerCrossEntropy(HeadObjective):
    """Cross-entropy of the shared head at some layers; of a regression the squared error."""

    in_evaluation = False

    @abstractmethod
    def scale(self, step: int) -> Mapping[int, float]:
        """The weight of each layer in this step."""

    def terms(self, step: int) -> Sequence[HeadTerm]:
        """See `HeadObjective`."""
        scale = self.scale(step)
        return [HeadTerm("cross_entropy", layer, weight) for layer, weight in scale.items()]

    def named(self, step: int, loss: Tensor, means: Mapping[int, Tensor]) -> Metrics:
        """See `HeadObjective`; each layer's own as `loss_layer_<l>`."""
        layers = {f"loss_layer_{layer}": mean for layer, mean in means.items()}
        return {**layers, f"{self.name}_loss": loss}

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        if self.reads_head(batch):
            return super().forward(batch)
        scale = self.scale(batch.step)
        states = {layer: batch.hidden[layer] for layer in scale}
        loss, means = weighted_layer_squares(states, batch.classifier, batch.labels, scale)
        return loss, self.named(batch.step, loss.detach(), means)


class CrossEntropy(_LayerCrossEntropy):
    """Cross-entropy of the last layer alone: ordinary training."""

    def __init__(self, options: CrossEntropyOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.num_layers = context.num_layers
        self.balanced = options.balanced

    def scale(self, step: int) -> Mapping[int, float]:
        """The last layer."""
        return {self.num_layers: 1.0}

    def reads_head(self, batch: LossInputs) -> bool:
        """See `HeadObjective`."""
        return not self.balanced and super().reads_head(batch)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        if not self.balanced:
            return super().forward(batch)
        logits = batch.classifier(batch.hidden[self.num_layers])
        loss = balanced_cross_entropy(logits, batch.labels)
        return loss, {"ce_loss": loss.detach()}


class Aligned(_LayerCrossEntropy):
    """The aligned loss (eq. 3) at the chosen layers.

    Minimising it alone costs the last layer some quality, so with `alternate` (the default, and
    what the paper's appendix C does) every second optimizer step, beginning with the second,
    minimises the last layer's plain cross-entropy instead.

    With `sample` = k, an aligned step reads k of the layers below the last, drawn anew by the
    seed and the step. Each weight is divided by the chance k / n of being drawn, so the expected
    loss is that of all n. The head then runs k + 1 times, whatever n.
    """

    def __init__(self, options: AlignedOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.num_layers = context.num_layers
        layers = options.layers_used(context.exit_layers, context.num_layers)
        self.all_layers = dict(zip(layers, layer_weights(layers, options.weights), strict=True))
        self.inner = [layer for layer in layers if layer != self.num_layers]
        self.alternate = options.alternate
        self.sample = options.sample
        self.seed = context.seed

    def scale(self, step: int) -> Mapping[int, float]:
        """The layers of this step; on a plain one, the last alone."""
        if self._is_plain(step):
            return {self.num_layers: 1.0}
        if self.sample is None or self.sample >= len(self.inner):
            return self.all_layers
        drawn = sorted(random.Random(f"{self.seed} {step}").sample(self.inner, self.sample))
        rarer = len(self.inner) / self.sample
        scale = {layer: rarer * self.all_layers[layer] for layer in drawn}
        return {**scale, self.num_layers: self.all_layers[self.num_layers]}

    def named(self, step: int, loss: Tensor, means: Mapping[int, Tensor]) -> Metrics:
        """See `HeadObjective`; the loss of a plain step is named `ce_loss`."""
        metrics = super().named(step, loss, means)
        if self._is_plain(step):
            metrics["ce_loss"] = metrics.pop(f"{self.name}_loss")
        return metrics

    def _is_plain(self, step: int) -> bool:
        return self.alternate and step % 2 == 1


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
            loss, metrics = _cross_entropy(batch, batch.classifier, last, 1.0, batch.hidden[last])
            return loss, {**metrics, "ce_loss": loss.detach()}
        loss, metrics = _cross_entropy(
            batch, batch.classifier, last, self.scale[last], batch.hidden[last]
        )
        for layer in self.inner:
            states = batch.hidden[layer]
            states = states.detach() if self.options.detach else states
            part, found = _cross_entropy(batch, self._head(layer), layer, self.scale[layer], states)
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
                mask=batch.counted(layer),
            )
            total = total + divergence
        return total


class CosineAlignment(Objective):
    """Turns the states of layers towards the last one's: L_sim of appendix C."""

    def __init__(self, options: CosineAlignmentOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.options = options
        self.num_layers = context.num_layers
        self.chosen = options.layers_used(context.exit_layers, context.num_layers)

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`."""
        return self.chosen

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


class KLToLast(HeadObjective):
    """Turns what layers predict towards what the last one predicts, or a frozen teacher's."""

    def __init__(self, options: KLToLastOptions, context: BuildContext) -> None:
        super().__init__(options.name, options.weight)
        self.num_layers = context.num_layers
        self.temperature = options.temperature
        chosen = options.layers_used(context.exit_layers, context.num_layers)
        path = options.teacher_path(context.initial_model)
        dtype = torch.bfloat16 if context.bf16 else torch.float32
        self.frozen = None if path is None else FrozenTeacher(path, dtype)
        scale = dict(zip(chosen, layer_weights(chosen, options.weights), strict=True))
        if self.frozen is None:
            del scale[self.num_layers]  # which teaches
        self.scale = scale

    def terms(self, step: int) -> Sequence[HeadTerm]:
        """See `HeadObjective`. T^2 keeps the gradients' size as T grows."""
        return [
            HeadTerm("divergence", layer, weight * self.temperature**2)
            for layer, weight in self.scale.items()
        ]

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`: a last layer that teaches is read, too."""
        return sorted({*self.scale, self.num_layers} if self.frozen is None else self.scale)

    def counted(self, batch: LossInputs, layer: int) -> Tensor:
        """See `HeadObjective`: tokens that the teacher, full depth, has a state for."""
        return batch.counted(self.num_layers)

    def teacher(self, batch: LossInputs) -> Teacher:
        """See `HeadObjective`."""
        if self.frozen is None:
            states, head = batch.hidden[self.num_layers].detach(), batch.classifier
        else:
            states, head = self.frozen.states(batch.inputs), self.frozen.head
        return Teacher(states.flatten(0, 1), head, self.temperature)


def _cross_entropy(
    batch: LossInputs, head: OutputHead, layer: int, weight: float, states: Tensor
) -> tuple[Tensor, Metrics]:
    """The weighted loss of one layer, and its own as `loss_layer_<l>`; of a regression squares."""
    chosen, scale = {layer: states}, {layer: weight}
    if batch.labels.is_floating_point():
        loss, losses = weighted_layer_squares(chosen, head, batch.labels, scale)
    else:
        masks = None if batch.depth is None else {layer: batch.reached(layer)}
        loss, losses = weighted_layer_cross_entropy(chosen, head, batch.labels, scale, masks=masks)
    return loss, {f"loss_layer_{layer}": losses[layer]}


def _copied_head(head: OutputHead) -> nn.ModuleDict:
    """A norm and an untied linear map, beginning as the model's own."""
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy
    own = nn.ModuleDict({"norm": copied(head.norm), "linear": copied(head.linear)})
    # Of a model under LoRA everything is frozen, and so were the copies.
    return own.requires_grad_(True)
