"""Losses of multi-exit training: functions of hidden states, labels and a classifier."""

from exitserve_training.losses.aligned import aligned_cross_entropy, layer_cross_entropy
from exitserve_training.losses.chunked import chunked_cross_entropy
from exitserve_training.losses.weights import WEIGHT_SCHEMES, layer_weights

__all__ = [
    "WEIGHT_SCHEMES",
    "aligned_cross_entropy",
    "chunked_cross_entropy",
    "layer_cross_entropy",
    "layer_weights",
]
