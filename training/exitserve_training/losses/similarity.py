"""SimReg: tokens with the same next token drawn together, all others pushed apart.

Paper: SimReg, section 3, eq. 3. In one sequence, token i has the positive set P_i of tokens with
its label (the next token), itself among them, and the negative set N_i of all others. With
phi_ij = exp(cos(e_i, e_j) / tau):

    L_i  = log sum over j in N_i of phi_ij  -  log sum over j in P_i of phi_ij
    loss = mean over tokens i of softplus(L_i)

It is added to the cross-entropy, times 10 sqrt(D / 1024), on the last layer (section 5.3). At
tau = 0.01 phi reaches e^100, beyond float32, hence log-sum-exp throughout.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from exitserve_training.losses.pairs import ZERO, by_rows, label_counts, log_sum, products
from exitserve_training.losses.tokens import IGNORED, counted_states, unit_vectors

INNER_LIMIT = 1e12
"""Components beyond this count as this in inner products, whose float32 sums so stay finite."""

Similarity = Literal["cosine", "inner"]


def simreg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    similarity: Similarity = "cosine",
    chunk_size: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns softplus(L_i) of eq. 3, averaged over the tokens (float32; float64 for float64).

    A token without negatives contributes 0. A sequence counts by its number of counted tokens.
    With no counted token at all the loss is 0 with zero gradients.

    Chunks are weighted "according to the ratio of positive and negative samples", for which the
    paper gives no formula. Here each token weighs (positive pairs) / (negative pairs) of its
    chunk, a token with itself being a positive pair, normalised over the sequence; a chunk
    without negatives weighs 0.

    Args:
        embeddings: hidden states [B, T, D] of the layer that is regularised.
        labels: next tokens [B, T], already shifted; -100 is ignored.
        temperature: tau; 0.01 is the paper's for all its models.
        similarity: `"cosine"` (the paper's final form) or `"inner"`, the plain inner product,
            also divided by the temperature.
        chunk_size: tokens are compared within chunks of so many positions only (chunk-wise
            SimReg; the paper measures 1024); None compares the whole sequence.
        mask: bool [B, T]; tokens where it is False are ignored.
    """
    labelled = labels != IGNORED
    vectors, counted = counted_states(embeddings, labelled if mask is None else labelled & mask)
    if similarity == "cosine":
        vectors = unit_vectors(vectors, ZERO)
    else:
        vectors = vectors.clamp(-INNER_LIMIT, INNER_LIMIT)
    rows, tokens = labels.shape
    size = tokens if chunk_size is None else min(chunk_size, tokens)
    # Chunks become rows of their own; the last is filled up with tokens that do not count.
    padding = -tokens % size
    vectors = functional.pad(vectors, (0, 0, 0, padding)).reshape(-1, size, vectors.shape[-1])
    labels = functional.pad(labels, (0, padding)).reshape(-1, size)
    counted = functional.pad(counted, (0, padding)).reshape(-1, size)
    positives = label_counts(labels, counted)
    losses = _token_losses(vectors, labels, counted, positives, temperature)
    per_row = (rows, -1, size)
    weights = _token_weights(counted.reshape(per_row), positives.reshape(per_row).to(losses.dtype))
    return (losses.reshape(per_row) * weights).sum()


def _token_losses(
    vectors: Tensor, labels: Tensor, counted: Tensor, positives: Tensor, temperature: float
) -> Tensor:
    """softplus(L_i) [B, T] of tokens, each with a vector [B, T, D], that are compared with all
    others of their row; `positives` is |P_i|, `temperature` tau."""

    def log_ratios(start: int, stop: int) -> Tensor:
        scores = products(vectors[:, start:stop], vectors) / temperature
        same = labels[:, start:stop, None] == labels[:, None, :]
        columns = counted[:, None, :]
        return log_sum(scores, ~same & columns) - log_sum(scores, same & columns)

    log_ratio = by_rows(log_ratios, labels.shape[1])
    contributes = counted & (counted.sum(dim=1, keepdim=True) > positives)
    return functional.softplus(log_ratio).masked_fill(~contributes, 0.0)


def _token_weights(counted: Tensor, positives: Tensor) -> Tensor:
    """The weight of each token's loss in the mean, for chunks of tokens [B, C, S] and |P_i| within
    the chunk; they sum to 1 where all chunks have negatives."""
    weights = counted.to(positives.dtype)
    tokens = weights.sum(dim=2, keepdim=True)
    pairs = positives.sum(dim=2, keepdim=True)
    negative_pairs = tokens.square() - pairs
    ratio = pairs / negative_pairs.clamp(min=1.0)
    weights = weights * torch.where(negative_pairs > 0, ratio, 0.0)
    per_row = tokens.sum(dim=1, keepdim=True)
    share = per_row / per_row.sum().clamp(min=1.0)
    return weights * share / weights.sum(dim=(1, 2), keepdim=True).clamp(min=ZERO)
