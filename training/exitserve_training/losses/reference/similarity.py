"""Plain loops for `similarity.py` and `contrastive.py`: one token, one pair at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exitserve_training.losses.tokens import IGNORED


def simreg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    similarity: str = "cosine",
    grouping: str = "sum",
    chunk_size: int | None = None,
    chunk_weights: str = "ratio",
    mask: Tensor | None = None,
) -> Tensor:
    """SimReg, eq. 3, with softplus; arguments as `exitserve_training.losses.similarity.simreg`."""
    vectors = embeddings.float() if embeddings.dtype != torch.float64 else embeddings
    size = labels.shape[1] if chunk_size is None else chunk_size
    total = vectors.sum() * 0.0
    rows = counted_positions(labels, mask)
    for row, tokens in enumerate(rows):
        row_sum, row_weight = total * 0.0, 0.0
        for chunk in range(labels.shape[1] // size + 1):
            inside = [token for token in tokens if token // size == chunk]
            if not inside:
                continue
            kept, names = vectors[row, inside], labels[row, inside]
            loss = chunk_loss(kept, names, temperature, similarity, grouping)
            weight = float(len(inside))
            if chunk_weights == "ratio":
                weight *= pair_ratio(names)
            row_sum, row_weight = row_sum + weight * loss, row_weight + weight
        if row_weight:
            total = total + len(tokens) * row_sum / row_weight
    return total / max(sum(len(tokens) for tokens in rows), 1)


def chunk_loss(
    vectors: Tensor, labels: Tensor, temperature: float, similarity: str, grouping: str
) -> Tensor:
    """The mean of softplus(L_i) over tokens [N, D] that are all compared with each other."""
    score = cosine if similarity == "cosine" else torch.dot
    terms: dict[int, list[Tensor]] = {}
    for i, label in enumerate(labels.tolist()):
        positives: list[Tensor] = []
        negatives: list[Tensor] = []
        for j, other in enumerate(labels.tolist()):
            log_phi = score(vectors[i], vectors[j]) / temperature
            (positives if label == other else negatives).append(log_phi)
        term = softplus_ratio(negatives, positives, grouping) if negatives else vectors.sum() * 0.0
        terms.setdefault(label, []).append(term)
    if grouping == "label":
        return average([average(group) for group in terms.values()])
    return average([term for group in terms.values() for term in group])


def pair_ratio(labels: Tensor) -> float:
    """Pairs of equal labels (each token with itself among them) over pairs of different labels."""
    pairs = [a == b for a in labels.tolist() for b in labels.tolist()]
    return pairs.count(True) / pairs.count(False) if False in pairs else 0.0


def softplus_ratio(negatives: list[Tensor], positives: list[Tensor], grouping: str) -> Tensor:
    """softplus(log sum exp negatives - log sum exp positives), or of the means."""
    # exp(100) is beyond float32: the logarithm of the sum is taken without forming the sum.
    ratio = torch.logsumexp(torch.stack(negatives), 0) - torch.logsumexp(torch.stack(positives), 0)
    if grouping == "mean":
        ratio = ratio - math.log(len(negatives) / len(positives))
    return torch.logaddexp(ratio, torch.zeros_like(ratio))


def simcse(
    embeddings: Tensor,
    labels: Tensor,
    *,
    views: Tensor | None = None,
    level: str = "sequence",
    temperature: float = 0.05,
    mask: Tensor | None = None,
) -> Tensor:
    """Unsupervised SimCSE; arguments as `exitserve_training.losses.contrastive.simcse`."""
    second = embeddings if views is None else views
    positions = counted_positions(labels, mask)
    if level == "sequence":
        rows = [row for row, tokens in enumerate(positions) if tokens]
        queries = [embeddings[row, positions[row]].mean(0) for row in rows]
        keys = [second[row, positions[row]].mean(0) for row in rows]
        return average(info_nce(queries, keys, temperature), embeddings)
    losses = []
    for row, tokens in enumerate(positions):
        queries, keys = [embeddings[row, i] for i in tokens], [second[row, i] for i in tokens]
        losses += info_nce(queries, keys, temperature)
    return average(losses, embeddings)


def cpretrain(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.07,
    mask: Tensor | None = None,
) -> Tensor:
    """Contrastive pretraining; arguments as `...losses.contrastive.cpretrain`."""
    losses = []
    for row, tokens in enumerate(counted_positions(labels, mask)):
        first, second = [], []
        for i in tokens:
            later = [j for j in tokens if j > i and labels[row, i] == labels[row, j]]
            if later:
                first.append(embeddings[row, i])
                second.append(embeddings[row, later[0]])
        rows, columns = info_nce(first, second, temperature), info_nce(second, first, temperature)
        losses += [(a + b) / 2 for a, b in zip(rows, columns, strict=True)]
    return average(losses, embeddings)


def creg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.1,
    mask: Tensor | None = None,
) -> Tensor:
    """Supervised contrastive loss; arguments as `...losses.contrastive.creg`."""
    losses = []
    for row, tokens in enumerate(counted_positions(labels, mask)):
        for i in tokens:
            scores = {
                j: cosine(embeddings[row, i], embeddings[row, j]) / temperature
                for j in tokens
                if j != i
            }
            positives = [j for j in scores if labels[row, i] == labels[row, j]]
            if positives:
                everything = torch.logsumexp(torch.stack(list(scores.values())), 0)
                losses.append(average([everything - scores[p] for p in positives]))
    return average(losses, embeddings)


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
    """Similarity contrastive estimation; arguments as `...losses.contrastive.sce`."""
    second = (embeddings if views is None else views).detach()
    losses = []
    for row, tokens in enumerate(counted_positions(labels, mask)):
        for i in tokens:
            same = [j for j in tokens if labels[row, i] == labels[row, j]]
            other = [j for j in tokens if labels[row, i] != labels[row, j]]
            scores = {j: cosine(embeddings[row, i], second[row, j]) / temperature for j in tokens}
            everything = torch.logsumexp(torch.stack(list(scores.values())), 0)
            loss = average([contrast * (everything - scores[j]) for j in same])
            if other:
                target = [cosine(second[row, i], second[row, j]) for j in other]
                relation = (torch.stack(target) / target_temperature).softmax(0)
                for weight, j in zip(relation, other, strict=True):
                    loss = loss + (1.0 - contrast) * weight * (everything - scores[j])
            losses.append(loss)
    return average(losses, embeddings)


def info_nce(queries: list[Tensor], keys: list[Tensor], temperature: float) -> list[Tensor]:
    """-log softmax of each query's score with its own key among all keys."""
    losses = []
    for i, query in enumerate(queries):
        scores = [cosine(query, key) / temperature for key in keys]
        losses.append(torch.logsumexp(torch.stack(scores), 0) - scores[i])
    return losses


def counted_positions(labels: Tensor, mask: Tensor | None) -> list[list[int]]:
    """For each row the positions that have a label and are not masked."""
    return [
        [
            token
            for token in range(labels.shape[1])
            if labels[row, token] != IGNORED and (mask is None or bool(mask[row, token]))
        ]
        for row in range(labels.shape[0])
    ]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> / (|a| |b|), and 0 where either is the zero vector."""
    dot, squared_a, squared_b = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    if not bool(squared_a) or not bool(squared_b):
        return dot * 0.0
    return dot / (squared_a.sqrt() * squared_b.sqrt())


def average(values: list[Tensor], source: Tensor | None = None) -> Tensor:
    """The mean; of nothing 0, with zero gradients for `source`."""
    if not values and source is not None:
        return source.sum() * 0.0
    return torch.stack(values).mean()
