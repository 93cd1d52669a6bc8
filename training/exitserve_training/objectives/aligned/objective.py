"""Plain and aligned cross-entropy, and the alternatives that the paper compares with.

All of the aligned-training paper: eq. 3, its alternation and cosine baseline (appendix C), and
the multi-exit model with a classifier per exit that figure 3 compares it with.
"""

import copy
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from exitserve.checkpoint.decoder import capture_hidden
from exitserve_training.losses import (
    OutputHead,
    Teacher,
    aligned_cross_entropy,
    balanced_cross_entropy,
    cosine_alignment,
)
from exitserve_training.losses.head import Classifier
from exitserve_training.models import load_model
from exitserve_training.objectives.aligned.options import (
    AlignedOptions,
    CosineAlignmentOptions,
    CrossEntropyOptions,
    KLToLastOptions,
    SeparateClassifiersOptions,
)
from exitserve_training.objectives.head_objective import HeadObjective, HeadTerm
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext
from exitserve_training.parts import model_parts


class _LayerCrossEntropy(HeadObjective):
    """Cross-entropy of the shared head at some layers."""

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


class CrossEntropy(_LayerCrossEntropy):
    """Cross-entropy of the last layer alone: ordinary training."""

    def __init__(self, options: CrossEntropyOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.balanced = options.balanced

    def scale(self, step: int) -> Mapping[int, float]:
        """The last layer."""
        return {self.num_layers: 1.0}

    @property
    def reads_head(self) -> bool:
        """See `HeadObjective`."""
        return not self.balanced

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
        super().__init__(options, context)
        self.all_layers = options.scale_of(self.chosen)
        self.inner = [layer for layer in self.chosen if layer != self.num_layers]
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
        super().__init__(options, context)
        self.alternate = options.alternate
        self.scale = options.scale_of(self.chosen)
        self.inner = [layer for layer in self.chosen if layer != self.num_layers]
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
        is_plain = self._is_plain(batch.step)
        scale = {self.num_layers: 1.0} if is_plain else self.scale
        loss = torch.zeros((), device=batch.labels.device)
        metrics: Metrics = {}
        for layer, weight in scale.items():
            head = batch.classifier if layer == self.num_layers else self._head(layer)
            part, means = aligned_cross_entropy(
                {layer: batch.hidden[layer]},
                head,
                batch.labels,
                {layer: weight},
                masks=None if batch.depth is None else {layer: batch.reached(layer)},
            )
            loss = loss + part
            metrics[f"loss_layer_{layer}"] = means[layer]
        return loss, {**metrics, "ce_loss" if is_plain else f"{self.name}_loss": loss.detach()}

    def _is_plain(self, step: int) -> bool:
        return self.alternate and step % 2 == 1

    def _head(self, layer: int) -> OutputHead:
        own = self.heads[str(layer)]
        assert isinstance(own, nn.ModuleDict)
        return OutputHead(own["norm"], own["linear"], self.soft_cap)


class CosineAlignment(Objective):
    """Turns the states of layers towards the last one's: L_sim of appendix C."""

    def __init__(self, options: CosineAlignmentOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.scale = options.scale_of(self.chosen)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        """See `Objective`."""
        hidden = {layer: batch.hidden[layer] for layer in self.scale}
        loss = cosine_alignment(hidden, self.scale, mask=batch.reached(max(hidden)))
        return loss, {"cosine_alignment_loss": loss.detach()}


class KLToLast(HeadObjective):
    """Turns what layers predict towards what the last one predicts, or a frozen teacher's."""

    def __init__(self, options: KLToLastOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.temperature = options.temperature
        path = options.teacher_path(context.initial_model)
        dtype = torch.bfloat16 if context.bf16 else torch.float32
        self.frozen = None if path is None else FrozenTeacher(path, dtype, context.compile_layers)
        self.scale = options.scale_of(self.chosen)
        if self.frozen is None:
            del self.scale[self.num_layers]  # which teaches

    def terms(self, step: int) -> Sequence[HeadTerm]:
        """See `HeadObjective`. T^2 keeps the gradients' size as T grows."""
        return [
            HeadTerm("divergence", layer, weight * self.temperature**2)
            for layer, weight in self.scale.items()
        ]

    def layers(self, step: int) -> Sequence[int]:
        """See `Objective`: a last layer that teaches is read, too."""
        return self.chosen

    def counted(self, batch: LossInputs, layer: int) -> Tensor:
        """See `HeadObjective`: tokens that the teacher, full depth, has a state for."""
        return batch.counted(self.num_layers)

    def teacher(self, batch: LossInputs) -> Teacher:
        """See `HeadObjective`."""
        if self.frozen is None:
            states, head = batch.hidden[self.num_layers].detach(), batch.classifier
        else:
            states, head = self.frozen.states(batch.inputs), self.frozen.parts.head
        return Teacher(states.flatten(0, 1), head, self.temperature)


class FrozenTeacher:
    """A model that does not learn, whose predictions at full depth exits are turned to.

    No `Module`: neither checkpoints, nor the optimizer, nor sharding shall see its weights.
    """

    def __init__(
        self, path: str, dtype: torch.dtype = torch.float32, compile_layers: bool = False
    ) -> None:
        self.model = load_model(path, dtype=dtype)
        self.model.requires_grad_(False)
        self.model.train(False)
        self.parts = model_parts(self.model)
        if compile_layers:
            self.parts.compile_layers()

    @torch.no_grad()
    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Un-normed states [B, T, D] after its last layer.

        Args:
            inputs: what the trained model's body was given.
        """
        device = inputs["input_ids"].device
        if self.model.device != device:
            torch.nn.Module.to(self.model, device)
        last = self.parts.num_layers
        no_cache = {"use_cache": False} if self.parts.task == "next token" else {}
        with capture_hidden(self.parts.layers, [last]) as captured:
            self.parts.body(**inputs, **no_cache)
        states: Tensor = captured[last]
        return states


def _copied_head(head: OutputHead) -> nn.ModuleDict:
    """A norm and an untied linear map, beginning as the model's own."""
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy
    own = nn.ModuleDict({"norm": copied(head.norm), "linear": copied(head.linear)})
    # Of a model under LoRA everything is frozen, and so were the copies.
    return own.requires_grad_(True)
