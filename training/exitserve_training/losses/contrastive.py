"""The contrastive losses that SimReg is compared with, as losses of token embeddings.

Paper: SimReg, section 5, "Baselines", which cites the four methods and gives half a sentence to
each. How they were adapted to pretraining it does not say. Here each keeps the loss of its own
paper, on cosine similarities over a temperature, and every docstring says what takes the place of
that paper's pairs.

All take hidden states [B, T, D], labels [B, T] (next tokens, already shifted; -100 is ignored) and
a mask, bool [B, T]. All but `simcse` compare the tokens of one sequence, as SimReg does.
"""

import torch
from torch import Tensor

from exitserve_training.losses.pairs import FAR, ZERO, by_rows, label_counts, log_sum, products
from exitserve_training.losses.tokens import IGNORED, counted_states, mean_of, unit_vectors


def simcse(
    embeddings: Tensor,
    labels: Tensor,
    *,
    views: Tensor | None = None,
    temperature: float = 0.05,
    mask: Tensor | None = None,
) -> Tensor:
    """Unsupervised SimCSE (Gao et al. 2021, eq. 1): a second view of each is its positive.

        l_i = -log( exp(cos(h_i, h'_i) / tau) / sum over j of exp(cos(h_i, h'_j) / tau) )

    A sentence is a row of the batch, and its embedding the mean over its counted tokens: a
    decoder has no [CLS] token, and of a classifier it alone counts. With one row alone the loss
    is 0. Labels only say which tokens count.

    Args:
        embeddings: hidden states.
        labels: next tokens.
        views: [B, T, D], the same tokens under another dropout mask. None takes `embeddings`
            again, which is SimCSE with dropout 0 (its table 3).
        temperature: tau; 0.05 is SimCSE's.
        mask: tokens where it is False are ignored.
    """
    first, counted = _counted(embeddings, labels, mask)
    second = first if views is None else _counted(views, labels, mask)[0]
    # The vectors that do not count are zero, and the length of the mean does not matter.
    first, second = (unit_vectors(one.mean(dim=1)[None], ZERO) for one in (first, second))
    rows = counted.any(dim=1)[None]
    return mean_of(_info_nce(first, second, rows, temperature), rows)


def cpretrain(
    embeddings: Tensor, labels: Tensor, *, temperature: float = 0.07, mask: Tensor | None = None
) -> Tensor:
    """Contrastive pretraining (Neelakantan et al. 2022, section 2): a pair against all others.

    N pairs (x, y) give the N x N scores cos(x_i, y_k) / tau; the loss is the mean of the
    cross-entropies of its rows and of its columns, whose targets are the diagonal. The method
    pairs neighbouring pieces of text. Here x is a token and y the next token of the sequence
    with the same label; the other pairs of the sequence are the negatives, those of the same
    label among them, as the method knows no labels. The mean is over the pairs. The temperature
    is trained in the method; 0.07 is where CLIP, whose loss it is, starts from.
    """
    vectors, counted = _counted(embeddings, labels, mask)
    partner, paired = _next_of_same_label(labels, counted)
    first = unit_vectors(vectors, ZERO)
    second = first.gather(1, partner[..., None].expand_as(first))
    rows = _info_nce(first, second, paired, temperature)
    columns = _info_nce(second, first, paired, temperature)
    return mean_of((rows + columns) / 2, paired)


def creg(
    embeddings: Tensor, labels: Tensor, *, temperature: float = 0.1, mask: Tensor | None = None
) -> Tensor:
    """Representation consistency (CReg, Yin et al. 2023): one contrastive term per positive pair.

        l_i = mean over p in P_i \\ {i} of
              -log( exp(cos(e_i, e_p) / tau) / sum over j != i of exp(cos(e_i, e_j) / tau) )

    P_i are the tokens with the label of i. This is the supervised contrastive loss (Khosla et
    al. 2020, L_out, temperature 0.1). CReg's other half, consistent predictions under two dropout
    masks, acts on the logits and is left out. A token whose label occurs once has no term and
    does not count in the mean.
    """
    vectors, counted = _counted(embeddings, labels, mask)
    vectors = unit_vectors(vectors, ZERO)
    others = label_counts(labels, counted) - 1
    position = torch.arange(labels.shape[1], device=labels.device)

    def block(start: int, stop: int) -> Tensor:
        scores = products(vectors[:, start:stop], vectors) / temperature
        same = labels[:, start:stop, None] == labels[:, None, :]
        columns = counted[:, None, :] & (position != position[start:stop, None])
        total = scores.masked_fill(~(same & columns), 0.0).sum(dim=-1)
        return log_sum(scores, columns) - total / others[:, start:stop].clamp(min=1)

    return mean_of(by_rows(block, labels.shape[1]), others > 0)


def sce(
    embeddings: Tensor,
    labels: Tensor,
    *,
    views: Tensor | None = None,
    contrast: float = 0.5,
    temperature: float = 0.1,
    target_temperature: float = 0.07,
    mask: Tensor | None = None,
) -> Tensor:
    """Similarity contrastive estimation (Denize et al. 2023): predict softened positives.

    With queries q from `embeddings` and keys k from `views`, without gradient:

        p_ij = softmax over j of cos(q_i, k_j) / tau
        s_ij = softmax over j in N_i of cos(k_i, k_j) / tau_m
        w_ij = lambda * [j in P_i] / |P_i|  +  (1 - lambda) * s_ij
        l_i  = - sum over j of w_ij * log p_ij

    The method has P_i = {i} and N_i all others. Here P_i are the tokens with the label of i and
    N_i those of another label, which is the same where all labels differ. A token without
    negatives keeps the first part of w only.

    Args:
        embeddings: hidden states.
        labels: next tokens.
        views: [B, T, D], the tokens from the method's target network; None: `embeddings` again.
        contrast: lambda in 0..1, the method's 0.5; 1 is the contrastive loss alone.
        temperature: tau, the method's 0.1.
        target_temperature: tau_m, the method's 0.07; below tau, so that targets are sharper.
        mask: tokens where it is False are ignored.
    """
    vectors, counted = _counted(embeddings, labels, mask)
    queries = unit_vectors(vectors, ZERO)
    keys = queries if views is None else unit_vectors(_counted(views, labels, mask)[0], ZERO)
    keys = keys.detach()
    positives = label_counts(labels, counted)

    def block(start: int, stop: int) -> Tensor:
        rows = slice(start, stop)
        scores = products(queries[:, rows], keys) / temperature
        columns = counted[:, None, :]
        log_p = scores - log_sum(scores, columns)[..., None]
        same = labels[:, rows, None] == labels[:, None, :]
        other = ~same & columns
        targets = products(keys[:, rows], keys) / target_temperature
        # Without negatives the softmax is over nothing, and made zero after it.
        relation = targets.masked_fill(~other, FAR).softmax(dim=-1).masked_fill(~other, 0.0)
        positive = (same & columns).to(scores.dtype) / positives[:, rows, None].clamp(min=1)
        weights = contrast * positive + (1.0 - contrast) * relation
        return -(weights * log_p).sum(dim=-1)

    return mean_of(by_rows(block, labels.shape[1]), counted)


def _counted(states: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states of tokens that have a label and are not masked, and which those are [B, T]."""
    labelled = labels != IGNORED
    return counted_states(states, labelled if mask is None else labelled & mask)


def _info_nce(queries: Tensor, keys: Tensor, counted: Tensor, temperature: float) -> Tensor:
    """-log softmax of query i's score with key i among all counted [B, T] keys of its row: [B, T];
    unit vectors [B, T, D]. The values of queries that do not count mean nothing."""

    def block(start: int, stop: int) -> Tensor:
        scores = products(queries[:, start:stop], keys) / temperature
        own = scores.diagonal(offset=start, dim1=1, dim2=2)
        return log_sum(scores, counted[:, None, :]) - own

    return by_rows(block, queries.shape[1])


def _next_of_same_label(labels: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the position of the next with its label, and whether there is one: [B, T]."""
    keys = labels.masked_fill(~counted, IGNORED)
    order = keys.argsort(dim=1, stable=True)
    ranked = keys.gather(1, order)
    follows = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != IGNORED)
    partner = torch.zeros_like(order).scatter(1, order[:, :-1], order[:, 1:])
    paired = torch.zeros_like(counted).scatter(1, order[:, :-1], follows)
    return partner, paired
