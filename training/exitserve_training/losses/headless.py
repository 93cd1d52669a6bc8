"""Training without predicting: contrastive weight tying, and the balanced cross-entropy.

Paper: headless language models. Contrastive weight tying (section 3.2) replaces the LM head's
cross-entropy: the output o_i at a position is trained to pick the input embedding e_i of its target
token among the embeddings of all targets of the batch, S:

    L_CWT = -1/|S| * sum over i in S of log( exp(o_i . e_i) / sum over j in S of exp(o_i . e_j) )

Its cost is |S|^2 * D instead of |S| * V * D, so it pays while the batch has fewer tokens than the
vocabulary (section 3.3). A model so trained has no head; the paper recovers one by a short
fine-tuning with plain cross-entropy, the head initialised with the input embeddings (section 4.2).

The balanced cross-entropy (appendix B.1) is for fine-tuning classifiers on uneven classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import IGNORED, Reduction, at_least_float32, check_reduction

BLOCK_ROWS = 512
"""Outputs compared with all N targets at once: of the N * N scores 512 * N floats exist at any
moment, 16 MB for 8192 tokens."""


def contrastive_weight_tying(
    outputs: Tensor,
    target_embeddings: Tensor,
    *,
    target_ids: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns L_CWT, section 3.2 (nats per token; log N if the outputs tell nothing).

    Targets are the input embeddings of the tokens to find: for a causal model those of the next
    tokens, for a masked model those of the masked tokens. Gradients reach both arguments; detach
    the embeddings to hold them fixed. There is no temperature and no normalisation: the scores
    are plain inner products, as in weight tying. Values are finite as long as those fit float32.

    A token that is the target of several positions enters the sum once per position, as the
    formula stands ("every input embedding at a different position in the batch", section 4.2);
    the other occurrences then are negatives that equal the positive. `target_ids` leaves them
    out.

    Args:
        outputs: the last layer's states [N, D], or [B, T, D].
        target_embeddings: the input embeddings of the targets, of the same shape.
        target_ids: the targets' tokens, [N] or [B, T]. If given, positions with the same token as
            the row's own target are no negatives of it.
        mask: bool [N] or [B, T], the positions in S; None for all. The others are neither rows
            nor negatives.
        reduction: `"mean"` over S (float32 scalar, 0 if S is empty), or `"none"`: float32 [N] or
            [B, T], 0 outside S.

    Raises:
        ExitServeError: shapes disagree, or `reduction` is unknown.
    """
    check_reduction(reduction)
    shape = outputs.shape[:-1]
    if outputs.ndim < 2 or outputs.shape != target_embeddings.shape:
        raise ExitServeError(
            f"outputs have shape {tuple(outputs.shape)}, target_embeddings "
            f"{tuple(target_embeddings.shape)}; expected the same [N, D] or [B, T, D]."
        )
    rows, targets = outputs.reshape(-1, outputs.shape[-1]), _flat_rows(target_embeddings)
    ids = None if target_ids is None else _of_shape("target_ids", target_ids, shape)
    counted = None if mask is None else _of_shape("mask", mask, shape).bool()
    if counted is not None:
        rows, targets = rows[counted], targets[counted]
        ids = None if ids is None else ids[counted]
    rows, targets = at_least_float32(rows), at_least_float32(targets)
    # Sums over no features: zeros that hang on the graph of both arguments if S is empty.
    blocks = [(rows[:0, :0] * targets[:0, :0]).sum(-1)]
    for start in range(0, rows.shape[0], BLOCK_ROWS):
        block: Tensor = checkpoint(
            _block_losses,
            rows[start : start + BLOCK_ROWS],
            targets,
            ids,
            start,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        blocks.append(block)
    return _reduced(torch.cat(blocks), counted, shape, reduction)


def balanced_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    frequencies: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns the cross-entropy in which every class counts alike (nats), appendix B.1.

    With L_c the summed cross-entropy of the examples of class c, and w_c the share of c, the
    paper divides: L_BCE is the sum over c of L_c / w_c. The text does not say what scales the
    sum; here it is divided by the sum of 1 / w over the examples, so that balanced classes give
    the plain mean cross-entropy. With the batch's own shares (the default, and what the paper
    does in practice) that is the mean, over the classes present, of the class's mean loss.

    Args:
        logits: [N, C], or any [..., C].
        labels: classes [N] or [...]; -100 is ignored.
        frequencies: w [C], the classes' shares or counts in the whole data set; None counts the
            batch's labels.
        mask: bool of the labels' shape, the examples that count; None for all.
        reduction: `"mean"` (float32 scalar, 0 where nothing counts), or `"none"`: float32 of the
            labels' shape, weighted so that the mean over the counted examples is the loss, 0
            where an example does not count.

    Raises:
        ExitServeError: shapes disagree, a label is not a class, a class among the labels has a
            frequency that is not positive, or `reduction` is unknown.
    """
    check_reduction(reduction)
    num_classes = logits.shape[-1]
    targets = _of_shape("labels", labels, logits.shape[:-1])
    counted = targets != IGNORED
    if mask is not None:
        counted = counted & _of_shape("mask", mask, labels.shape).bool()
    targets = targets[counted].long()
    _check_labels(targets, num_classes)
    losses = functional.cross_entropy(
        at_least_float32(_flat_rows(logits)[counted]), targets, reduction="none"
    )
    if frequencies is None:
        frequencies = torch.bincount(targets, minlength=num_classes)
    share = _shares(targets, frequencies.to(losses), num_classes)
    return _reduced(losses * share, counted, labels.shape, reduction)


def _block_losses(rows: Tensor, targets: Tensor, ids: Tensor | None, start: int) -> Tensor:
    """[n]: the losses of rows [n, D], whose own targets are targets[start : start + n] [N, D]."""
    own = torch.arange(start, start + rows.shape[0], device=rows.device)
    # Autocast would take the inner products to bfloat16, three digits.
    with torch.autocast(rows.device.type, enabled=False):
        scores = rows @ targets.T
    if ids is not None:
        repeats = ids[own, None] == ids
        repeats.scatter_(1, own[:, None], False)
        scores = scores.masked_fill(repeats, -torch.inf)
    return functional.cross_entropy(scores, own, reduction="none")


def _shares(targets: Tensor, frequencies: Tensor, num_classes: int) -> Tensor:
    """[N]: 1 / w of each example's class, scaled to the mean 1."""
    if frequencies.shape != (num_classes,):
        raise ExitServeError(
            f"frequencies have shape {tuple(frequencies.shape)}; expected one number for each of "
            f"the {num_classes} classes."
        )
    chosen = frequencies[targets]
    if not bool((chosen > 0.0).all()):
        missing = sorted(set(targets[~(chosen > 0.0)].tolist()))
        raise ExitServeError(
            f"classes {missing} occur among the labels, but their frequencies are not positive; "
            f"count them over the data that the labels come from."
        )
    inverse = 1.0 / chosen
    return inverse * (targets.numel() / inverse.sum())


def _check_labels(targets: Tensor, num_classes: int) -> None:
    wrong = targets[(targets < 0) | (targets >= num_classes)]
    if wrong.numel():
        raise ExitServeError(
            f"label {int(wrong[0])} is not a class: the logits have {num_classes}, so labels are "
            f"0..{num_classes - 1}, or {IGNORED} to be ignored."
        )


def _of_shape(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    """`values`, flat; raises `ExitServeError` unless they have this shape."""
    if values.shape != shape:
        raise ExitServeError(
            f"{name} has shape {tuple(values.shape)}; expected {tuple(shape)}, one per position."
        )
    return values.reshape(-1)


def _reduced(
    values: Tensor, counted: Tensor | None, shape: torch.Size, reduction: Reduction
) -> Tensor:
    """The counted positions' values [n] as their mean, or put back into `shape`."""
    if reduction == "mean":
        return values.sum() / max(values.numel(), 1)
    if counted is None:
        return values.reshape(shape)
    return values.new_zeros(counted.shape).masked_scatter(counted, values).reshape(shape)


def _flat_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])
