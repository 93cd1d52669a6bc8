"""Options of the objectives of the aligned-training paper. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from exitserve.errors import ExitServeError
from exitserve_training.layer_weights import counted_layers, layer_weights
from exitserve_training.objectives.options import Layers, ObjectiveOptions

LayerWeights = Literal["linear", "uniform"] | list[float]
"""Linear is the aligned paper's lambda, proportional to depth; a list is one number a layer."""


class CrossEntropyOptions(ObjectiveOptions):
    """Cross-entropy of the last layer alone: plain training."""

    implementation = "exitserve_training.objectives.aligned.objective:CrossEntropy"
    is_main = True
    trains_head = True
    for_classifiers = True
    classifier_fields = frozenset({"balanced"})

    name: Literal["ce"] = "ce"
    balanced: bool = False
    """Of a classifier: every class in a batch counts alike (headless paper, appendix B.1)."""


class _WeightedLayers(ObjectiveOptions):
    """Of objectives that sum over layers, the last always among them."""

    for_classifiers = True

    layers: Layers = "exits"
    weights: LayerWeights = "linear"

    def layers_used(self, exit_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """See `ObjectiveOptions`."""
        layers = counted_layers(num_layers, self._depths(self.layers, exit_layers, num_layers))
        layer_weights(layers, self.weights)  # raises where they are no weights
        if isinstance(self.weights, list) and len(self.weights) != len(layers):
            raise ExitServeError(
                f"objective {self.name!r}: weights has {len(self.weights)} numbers, but its "
                f"layers are {list(layers)}; give one for each."
            )
        if self._needs_inner and layers == (num_layers,):
            raise ExitServeError(
                f"objective {self.name!r} needs a layer below the last; set exit_layers, or its "
                f"layers."
            )
        return layers

    def scale_of(self, layers: Sequence[int]) -> dict[int, float]:
        """The weight of each of the layers that it reads."""
        return dict(zip(layers, layer_weights(layers, self.weights), strict=True))

    @property
    def _needs_inner(self) -> bool:
        """Whether it has no meaning for the last layer alone."""
        return True


class AlignedOptions(_WeightedLayers):
    """Cross-entropy of several layers through one norm and head (aligned training, eq. 3)."""

    implementation = "exitserve_training.objectives.aligned.objective:Aligned"
    is_main = True
    trains_head = True
    excludes: ClassVar[Mapping[str, str]] = {
        "ce": "both train the last layer; 'aligned' includes it, and alternates with it by "
        "default, so leave 'ce' out"
    }

    name: Literal["aligned"] = "aligned"
    sample: int | None = Field(default=None, ge=1)
    """Of the layers below the last, only so many each step, drawn anew: cheaper with many."""
    alternate: bool = True
    """Every second optimizer step is plain last-layer cross-entropy (appendix C)."""

    @property
    def _needs_inner(self) -> bool:
        return self.sample is not None


class SeparateClassifiersOptions(_WeightedLayers):
    """A separate norm and head for each exit (DeeBERT, BERxiT): the papers' baseline."""

    implementation = "exitserve_training.objectives.aligned.objective:SeparateClassifiers"
    is_main = True
    trains_head = True
    excludes: ClassVar[Mapping[str, str]] = {
        "headless": "one trains several heads, the other none; choose one"
    }

    name: Literal["separate_classifiers"] = "separate_classifiers"
    alternate: bool = False
    """Every second optimizer step is plain last-layer cross-entropy, as `aligned` has it."""


class CosineAlignmentOptions(_WeightedLayers):
    """1 - cos(h^l, h^L), added to a main loss (aligned training, appendix C: L_CE-reg)."""

    implementation = "exitserve_training.objectives.aligned.objective:CosineAlignment"

    name: Literal["cosine_alignment"] = "cosine_alignment"
    layers: Layers = "all"


class KLToLastOptions(_WeightedLayers):
    """KL(teacher || exit layer) through the shared head: distillation from the last layer."""

    implementation = "exitserve_training.objectives.aligned.objective:KLToLast"
    trains_head = True

    name: Literal["kl_to_last"] = "kl_to_last"
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    teacher: str | None = None
    """Null: the model's own last layer, as it learns. `initial`: the model as the run found it, or
    a directory or hub id; then the last layer is a pupil too."""

    @property
    def is_enough(self) -> bool:
        """With a frozen teacher the last layer learns too."""
        return self.teacher is not None

    def teacher_path(self, initial_model: str | None) -> str | None:
        """The frozen teacher's directory or hub id; None without one.

        Raises:
            ExitServeError: it is to be the initial model, and there is none.
        """
        if self.teacher == "initial" and initial_model is None:
            raise ExitServeError(
                f"objective {self.name!r}: teacher=initial is the model that is fine-tuned, and "
                f"this run is from scratch; give a directory or hub id."
            )
        return initial_model if self.teacher == "initial" else self.teacher

    @property
    def _needs_inner(self) -> bool:
        return self.teacher is None
