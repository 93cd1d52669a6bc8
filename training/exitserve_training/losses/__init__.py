"""Losses of multi-exit training: functions of hidden states, labels and a classifier.

Each works on plain tensors and knows no model; `objectives` makes terms of a run of them.
`reference` has slow versions, which they must equal.
"""

from exitserve_training.adagc import AdaGC
from exitserve_training.layer_weights import WEIGHT_SCHEMES, layer_weights
from exitserve_training.losses.aligned import (
    aligned_cross_entropy,
    layer_quality,
    weighted_layer_cross_entropy,
)
from exitserve_training.losses.contrastive import cpretrain, creg, sce, simcse
from exitserve_training.losses.head import OutputHead, Reading, Teacher
from exitserve_training.losses.head_losses import head_losses
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying
from exitserve_training.losses.implicit import Projector, nitp
from exitserve_training.losses.last_layer import cosine_alignment, kl_to_last
from exitserve_training.losses.measures import effective_rank, mean_cosine
from exitserve_training.losses.similarity import simreg, simreg_weight
from exitserve_training.losses.spread import (
    decorrelation,
    dispersion,
    l2_repel,
    orthogonalization,
)
from exitserve_training.losses.squares import weighted_layer_squares

__all__ = [
    "WEIGHT_SCHEMES",
    "AdaGC",
    "OutputHead",
    "Projector",
    "Reading",
    "Teacher",
    "aligned_cross_entropy",
    "balanced_cross_entropy",
    "contrastive_weight_tying",
    "cosine_alignment",
    "cpretrain",
    "creg",
    "decorrelation",
    "dispersion",
    "effective_rank",
    "head_losses",
    "kl_to_last",
    "l2_repel",
    "layer_quality",
    "layer_weights",
    "mean_cosine",
    "nitp",
    "orthogonalization",
    "sce",
    "simcse",
    "simreg",
    "simreg_weight",
    "weighted_layer_cross_entropy",
    "weighted_layer_squares",
]
