"""Losses of multi-exit training: functions of hidden states, labels and a classifier.

Each works on plain tensors and knows no model; `objectives` makes terms of a run of them.
"""

from exitserve_training.layer_weights import layer_weights
from exitserve_training.losses.aligned import aligned_cross_entropy, predictions
from exitserve_training.losses.contrastive import cpretrain, creg, sce, simcse
from exitserve_training.losses.cosine import cosine_alignment
from exitserve_training.losses.head import OutputHead, Reading, Teacher
from exitserve_training.losses.head_losses import head_losses
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying
from exitserve_training.losses.implicit import Projector, nitp
from exitserve_training.losses.measures import effective_rank, mean_cosine
from exitserve_training.losses.similarity import simreg
from exitserve_training.losses.spread import decorrelation, dispersion, l2_repel, orthogonalization

__all__ = [
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
    "l2_repel",
    "layer_weights",
    "mean_cosine",
    "nitp",
    "orthogonalization",
    "predictions",
    "sce",
    "simcse",
    "simreg",
]
