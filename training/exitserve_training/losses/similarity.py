"""SimReg: tokens with the same next token drawn together, all others pushed apart.

Paper: SimReg, section 3, eq. 3. In one sequence, token i has the positive set P_i of tokens with
its label (the next token), itself among them, and the negative set N_i of all others. With
phi_ij = exp(cos(e_i, e_j) / tau):

    L_i  = log sum over j in N_i of phi_ij  -  log sum over j in P_i of phi_ij
    loss = mean over tokens i of softplus(L_i)

It is added to the cross-entropy, times `simreg_weight(D)`, on the last layer (section 5.3). At
tau = 0.01 phi reaches e^100, beyond float32, hence log-sum-exp throughout.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_kernels.dispatch import choose
from exitserve_kernels.simreg import log_sums
from exitserve_training.losses.pairs import (
    FAR,
    ZERO,
    check_temperature,
    counted_vectors,
    label_counts,
    labelled_tokens,
    log_sum,
    row_losses,
    similarities,
)
from exitserve_training.losses.tokens import (
    Reduction,
    check_choice,
    check_reduction,
    unit_vectors,
)

INNER_LIMIT = 1e12
"""Components beyond this count as this in inner products, whose float32 sums so stay finite."""

Similarity = Literal["cosine", "inner"]

Grouping = Literal["sum", "mean", "label"]
"""What the loss averages. The introduction asks for "group-level rather than sample-level
averaging", and no formula shows it. Three readings:

- `"sum"` is eq. 3 as printed, and appendix B.2, where log(|N_i| / |P_i|) is part of the loss:
  a token has one term, which its two groups enter as wholes, not an average of one per pair.
- `"mean"` has the mean of phi over each set in place of the sum: L_i - log(|N_i| / |P_i|).
- `"label"` averages the terms of eq. 3 first over the tokens of each label, then over the labels
  of the sequence, so that frequent tokens do not dominate.
"""

ChunkWeights = Literal["ratio", "tokens"]
"""How chunks are weighted: "according to the ratio of positive and negative samples", for which
the paper gives no formula.

- `"ratio"`: each token weighs (positive pairs) / (negative pairs) of its chunk, a token with
  itself being a positive pair, normalised over the sequence. A chunk without negatives weighs 0.
- `"tokens"`: all tokens weigh the same.
"""


def simreg_weight(hidden_size: int) -> float:
    """Returns lambda = 10 * sqrt(D / 1024), which multiplies the loss (paper, appendix A.2).

    Raises:
        ExitServeError: `hidden_size` is not positive.
    """
    if not hidden_size > 0:
        raise ExitServeError(f"hidden_size {hidden_size!r} must be a positive number.")
    return 10.0 * math.sqrt(hidden_size / 1024)


def simreg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    similarity: Similarity = "cosine",
    grouping: Grouping = "sum",
    chunk_size: int | None = None,
    chunk_weights: ChunkWeights = "ratio",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns softplus(L_i) of eq. 3, averaged over the tokens (float32; float64 for float64).

    A token without negatives contributes 0. A sequence counts by its number of counted tokens.
    With no counted token at all the loss is 0 with zero gradients.

    Args:
        embeddings: hidden states [B, T, D] of the layer that is regularised.
        labels: next tokens [B, T], already shifted; -100 is ignored.
        temperature: tau; 0.01 is the paper's for all its models.
        similarity: `"cosine"` (the paper's final form) or `"inner"`, the plain inner product,
            also divided by the temperature.
        grouping: what is averaged; see `Grouping`.
        chunk_size: tokens are compared within chunks of so many positions only (chunk-wise
            SimReg; the paper measures 1024); None compares the whole sequence.
        chunk_weights: how chunks are weighted; see `ChunkWeights`.
        mask: bool [B, T]; tokens where it is False are ignored.
        reduction: `"none"` gives the unweighted softplus(L_i) of each token, [B, T], 0 where
            ignored.

    Raises:
        ExitServeError: an unknown option, a bad size or temperature, or shapes that disagree.
    """
    _check_options(temperature, similarity, grouping, chunk_size, chunk_weights, reduction)
    counted = labelled_tokens(embeddings, labels, mask)
    vectors = counted_vectors(embeddings, counted)
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
    losses = _token_losses(vectors, labels, counted, positives, temperature, grouping)
    if reduction == "none":
        return losses.reshape(rows, -1)[:, :tokens]
    per_row = (rows, -1, size)
    sizes = positives.reshape(per_row).to(losses.dtype)
    weights = _token_weights(counted.reshape(per_row), sizes, grouping, chunk_weights)
    return (losses.reshape(per_row) * weights).sum()


def _check_options(
    temperature: float,
    similarity: str,
    grouping: str,
    chunk_size: int | None,
    chunk_weights: str,
    reduction: str,
) -> None:
    check_choice("similarity", similarity, get_args(Similarity))
    check_choice("grouping", grouping, get_args(Grouping))
    check_choice("chunk_weights", chunk_weights, get_args(ChunkWeights))
    check_reduction(reduction)
    check_temperature("temperature", temperature)
    if chunk_size is not None and chunk_size < 1:
        raise ExitServeError(
            f"chunk_size {chunk_size!r} must be at least 1, such as 1024, or None for no chunks."
        )


def _token_losses(
    vectors: Tensor,
    labels: Tensor,
    counted: Tensor,
    positives: Tensor,
    temperature: float,
    grouping: Grouping,
) -> Tensor:
    """softplus(L_i) [B, T] of tokens that are compared with all others of their row.

    Args:
        vectors: what is multiplied, [B, T, D]; the other arguments as in `simreg`.
        positives: |P_i|, [B, T].
    """

    def log_ratios(start: int, stop: int) -> Tensor:
        scores = similarities(vectors[:, start:stop], vectors, temperature)
        same = labels[:, start:stop, None] == labels[:, None, :]
        columns = counted[:, None, :]
        return log_sum(scores, ~same & columns) - log_sum(scores, same & columns)

    if vectors.dtype == torch.float32 and choose("simreg", vectors.device) == "triton":
        log_ratio = _fused_log_ratios(vectors, labels, counted, temperature)
    else:
        log_ratio = row_losses(log_ratios, labels.shape[1])
    negatives = counted.sum(dim=1, keepdim=True) - positives
    if grouping == "mean":
        sizes = torch.stack([positives, negatives]).clamp(min=1).to(log_ratio.dtype).log()
        log_ratio = log_ratio + sizes[0] - sizes[1]
    contributes = counted & (negatives > 0)
    return functional.softplus(log_ratio).masked_fill(~contributes, 0.0)


def _fused_log_ratios(
    vectors: Tensor, labels: Tensor, counted: Tensor, temperature: float
) -> Tensor:
    """L_i [B, T] from the kernels; arguments as in `_token_losses`."""
    # Any number but -100 may be a label; to the kernels, negative ones do not count.
    keys = (labels - labels.amin()).long().masked_fill(~counted, -1)
    negatives, positives = log_sums(vectors, keys, temperature)
    # -inf, the sum of no pair: -inf - -inf would be NaN.
    return negatives.clamp(min=FAR) - positives.clamp(min=FAR)


def _token_weights(
    counted: Tensor, positives: Tensor, grouping: Grouping, chunk_weights: ChunkWeights
) -> Tensor:
    """The weight of each token's loss in the mean; they sum to 1 where all chunks have negatives.

    Args:
        counted: bool, B rows of chunks of tokens [B, C, S].
        positives: |P_i| within the chunk, as floats [B, C, S].
        grouping: as in `simreg`.
        chunk_weights: as in `simreg`.
    """
    weights = counted.to(positives.dtype)
    tokens = weights.sum(dim=2, keepdim=True)
    if grouping == "label":
        # One over the size of its label group; all groups together weigh what the tokens did.
        weights = weights / positives.clamp(min=1)
        weights = weights * tokens / weights.sum(dim=2, keepdim=True).clamp(min=0.5)
    if chunk_weights == "ratio":
        pairs = positives.sum(dim=2, keepdim=True)
        negative_pairs = tokens.square() - pairs
        ratio = pairs / negative_pairs.clamp(min=1.0)
        weights = weights * torch.where(negative_pairs > 0, ratio, 0.0)
    per_row = tokens.sum(dim=1, keepdim=True)
    share = per_row / per_row.sum().clamp(min=1.0)
    return weights * share / weights.sum(dim=(1, 2), keepdim=True).clamp(min=ZERO)
