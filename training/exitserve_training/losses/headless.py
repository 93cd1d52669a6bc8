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

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from exitserve_training.losses.tokens import IGNORED, at_least_float32

BLOCK_ROWS = 512
"""Outputs compared with all N targets at once: of the N * N scores 512 * N floats exist at any
moment, 16 MB for 8192 tokens."""


def contrastive_weight_tying(outputs: Tensor, target_embeddings: Tensor) -> Tensor:
    """Returns L_CWT, section 3.2 (nats per token; log N if the outputs tell nothing; 0 for N = 0).

    Gradients reach both arguments. There is no temperature and no normalisation: the scores are
    plain inner products, as in weight tying. A token that is the target of several positions
    enters the sum once per position, as the formula stands ("every input embedding at a different
    position in the batch", section 4.2).

    Args:
        outputs: the last layer's states [N, D].
        target_embeddings: [N, D], the input embeddings of the tokens to find: for a causal model
            the next tokens, for a masked model the masked ones.
    """
    rows, targets = at_least_float32(outputs), at_least_float32(target_embeddings)
    # Sums over no features: zeros that hang on the graph of both arguments if there is no row.
    blocks = [(rows[:0, :0] * targets[:0, :0]).sum(-1)]
    for start in range(0, rows.shape[0], BLOCK_ROWS):
        block: Tensor = checkpoint(
            _block_losses,
            rows[start : start + BLOCK_ROWS],
            targets,
            start,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        blocks.append(block)
    return torch.cat(blocks).sum() / max(rows.shape[0], 1)


def balanced_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy in which every class counts alike (nats), appendix B.1.

    With L_c the summed cross-entropy of the examples of class c, and w_c the share of c, the
    paper divides: L_BCE is the sum over c of L_c / w_c. The text does not say what scales the
    sum; here it is divided by the sum of 1 / w over the examples. With the batch's own shares, as
    in the paper, that is the mean, over the classes present, of the class's mean loss.

    Args:
        logits: [..., C].
        labels: classes [...]; -100 is ignored. With none the loss is 0.
    """
    counted = labels != IGNORED
    targets = labels[counted].long()
    losses = functional.cross_entropy(at_least_float32(logits[counted]), targets, reduction="none")
    inverse = 1.0 / torch.bincount(targets, minlength=logits.shape[-1]).to(losses)[targets]
    return (losses * inverse).sum() / inverse.sum().clamp_min(1e-12)


def _block_losses(rows: Tensor, targets: Tensor, start: int) -> Tensor:
    """[n]: the losses of rows [n, D], whose own targets are targets[start : start + n] [N, D]."""
    own = torch.arange(start, start + rows.shape[0], device=rows.device)
    # Autocast would take the inner products to bfloat16, three digits.
    with torch.autocast(rows.device.type, enabled=False):
        scores = rows @ targets.T
    return functional.cross_entropy(scores, own, reduction="none")
