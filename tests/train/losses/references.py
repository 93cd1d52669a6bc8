"""What losses must equal: loops over rows, tokens and pairs, as the papers print the formulas."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exitserve_training.losses.tokens import IGNORED


def simreg(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    similarity: str = "cosine",
    chunk_size: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """SimReg, eq. 3, with softplus."""
    size = labels.shape[1] if chunk_size is None else chunk_size
    total = embeddings.sum() * 0.0
    rows = counted_positions(labels, mask)
    for row, tokens in enumerate(rows):
        row_sum, row_weight = total * 0.0, 0.0
        for chunk in range(labels.shape[1] // size + 1):
            inside = [token for token in tokens if token // size == chunk]
            if not inside:
                continue
            kept, names = embeddings[row, inside], labels[row, inside].tolist()
            pairs = [a == b for a in names for b in names]
            ratio = pairs.count(True) / pairs.count(False) if False in pairs else 0.0
            loss = average(softplus_ratios(kept, names, temperature, similarity))
            row_sum = row_sum + len(inside) * ratio * loss
            row_weight += len(inside) * ratio
        if row_weight:
            total = total + len(tokens) * row_sum / row_weight
    return total / max(sum(len(tokens) for tokens in rows), 1)


def softplus_ratios(
    vectors: Tensor, names: list[int], temperature: float, similarity: str
) -> list[Tensor]:
    """softplus(L_i) of tokens [N, D] that are all compared with each other."""
    score = cosine if similarity == "cosine" else torch.dot
    terms = []
    for i, name in enumerate(names):
        sums: dict[bool, list[Tensor]] = {True: [], False: []}
        for j, other in enumerate(names):
            sums[name == other].append(score(vectors[i], vectors[j]) / temperature)
        if not sums[False]:
            terms.append(vectors.sum() * 0.0)
            continue
        # exp(100) is beyond float32: the logarithm of the sum is taken without forming the sum.
        negatives, positives = (torch.stack(sums[kind]).logsumexp(0) for kind in (False, True))
        terms.append(torch.logaddexp(negatives - positives, torch.zeros_like(negatives)))
    return terms


def simcse(
    embeddings: Tensor,
    labels: Tensor,
    *,
    views: Tensor | None = None,
    temperature: float = 0.05,
    mask: Tensor | None = None,
) -> Tensor:
    """Unsupervised SimCSE, of rows."""
    second = embeddings if views is None else views
    positions = counted_positions(labels, mask)
    rows = [row for row, tokens in enumerate(positions) if tokens]
    queries = [embeddings[row, positions[row]].mean(0) for row in rows]
    keys = [second[row, positions[row]].mean(0) for row in rows]
    return average(info_nce(queries, keys, temperature), embeddings)


def cpretrain(
    embeddings: Tensor, labels: Tensor, *, temperature: float = 0.07, mask: Tensor | None = None
) -> Tensor:
    """Contrastive pretraining."""
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
    embeddings: Tensor, labels: Tensor, *, temperature: float = 0.1, mask: Tensor | None = None
) -> Tensor:
    """Supervised contrastive loss."""
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
    """Similarity contrastive estimation."""
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
    counted = labels != IGNORED if mask is None else (labels != IGNORED) & mask
    return [row.nonzero().squeeze(-1).tolist() for row in counted]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> / (|a| |b|)."""
    return torch.dot(a, b) / (a.norm() * b.norm())


def average(values: list[Tensor], source: Tensor | None = None) -> Tensor:
    """The mean; of nothing 0, with zero gradients for `source`."""
    if not values and source is not None:
        return source.sum() * 0.0
    return torch.stack(values).mean()


def dispersion(z: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, eq. 2, less the log of the number of pairs (algorithm 1)."""
    values = []
    for tokens in sequences(z, mask):
        exponentials = [torch.exp(-angle(a, b) / temperature) for a, b in pairs_of(tokens)]
        values.append(torch.stack(exponentials).mean().log())
    return average(values, z)


def orthogonalization(z: Tensor, margin: float = 0.5, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, table 1, row 4."""
    values = []
    for tokens in sequences(z, mask):
        short = [(margin - angle(a, b)).clamp_min(0.0) for a, b in pairs_of(tokens)]
        values.append(torch.stack(short).square().mean())
    return average(values, z)


def l2_repel(
    z: Tensor,
    temperature: float = 1.0,
    norm_weight: float = 0.1,
    mask: Tensor | None = None,
    self_pairs: bool = True,
) -> Tensor:
    """Dispersion-loss paper, table 1, row 3, with means for sums."""
    values = []
    for tokens in sequences(z, mask):
        pairs = pairs_of(tokens) + [(a, a) for a in tokens if self_pairs]
        logits = [-(a - b).square().sum() / temperature for a, b in pairs]
        repel = torch.stack(logits).logsumexp(0) - math.log(len(logits))
        values.append(repel + norm_weight * tokens.square().mean())
    return average(values, z)


def decorrelation(z: Tensor, mask: Tensor | None = None, between: str = "tokens") -> Tensor:
    """Dispersion-loss paper, table 1, row 2, with the mean for the sum.

    As printed, mu_d and sigma_d are each token's over its d features, and the covariance is
    divided by d - 1. `features` exchanges tokens and features.
    """
    values = []
    for tokens in sequences(z, mask):
        rows = tokens if between == "tokens" else tokens.T
        standard = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        covariance = standard @ standard.T / (rows.shape[1] - 1)
        number = len(rows)
        squares = [covariance[m, n] ** 2 for m in range(number) for n in range(number) if m != n]
        values.append(torch.stack(squares).mean())
    return average(values, z)


def mean_cosine(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Dispersion-loss paper, section 3.2: mu, over all N^2 ordered pairs."""
    values = []
    for tokens in sequences(z, mask, least=1):
        values.append(torch.stack([cosine(a, b) for a in tokens for b in tokens]).mean())
    return average(values, z)


def effective_rank(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Roy and Vetterli 2007: exp of the entropy of the singular values' shares."""
    values = []
    for tokens in sequences(z, mask, least=1):
        singular = torch.linalg.svdvals(tokens)
        share = singular[singular > 0] / singular.sum()
        values.append(torch.exp(-(share * share.log()).sum()))
    return average(values, z)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Dispersion-loss paper, table 1: arccos(cossim(a, b)) / pi."""
    return cosine(a, b).arccos() / math.pi


def sequences(z: Tensor, mask: Tensor | None, least: int = 2) -> list[Tensor]:
    """The counted tokens [N, D] of each sequence that has enough of them."""
    rows = [row if mask is None else row[mask[index]] for index, row in enumerate(z)]
    return [row for row in rows if len(row) >= least]


def pairs_of(tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """All ordered pairs i != j."""
    return [(a, b) for i, a in enumerate(tokens) for j, b in enumerate(tokens) if i != j]


def nitp(
    hidden: Tensor,
    shallow: Tensor,
    projector: Callable[[Tensor], Tensor],
    target_shift: int = 1,
    distance: str = "cosine",
    mask: Tensor | None = None,
) -> Tensor:
    """NITP paper: the mean of 1 - cos(P(h_t), sg(z_{t+1})), or of the squared error."""
    values = []
    for row in range(hidden.shape[0]):
        for t in range(hidden.shape[1] - target_shift):
            ahead = t + target_shift
            if mask is not None and not (mask[row, t] and mask[row, ahead]):
                continue
            predicted, target = projector(hidden[row, t][None])[0], shallow[row, ahead].detach()
            squares = (predicted - target).square().mean()
            values.append(1.0 - cosine(predicted, target) if distance == "cosine" else squares)
    return average(values, hidden)


def cosine_alignment(hidden_states: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """L_sim, appendix C of the aligned-training paper, from L tensors [B, T, D], none zero."""
    tokens = [states.flatten(0, 1) for states in hidden_states]
    terms = [
        weight * (1.0 - cosine(state, last))
        for weight, states in zip(weights, tokens, strict=True)
        for state, last in zip(states, tokens[-1], strict=True)
    ]
    return torch.stack(terms).sum() / len(tokens[-1])


def contrastive_weight_tying(outputs: Tensor, target_embeddings: Tensor) -> Tensor:
    """Section 3.2 of the headless paper, from [N, D] and [N, D]."""
    total = torch.zeros(())
    for i, output in enumerate(outputs):
        scores = torch.stack([torch.dot(output, other) for other in target_embeddings])
        total = total - (scores[i] - scores.logsumexp(0))
    return total / len(outputs)


def balanced_cross_entropy(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Appendix B.1 of the headless paper, from [N, C]: the mean of the classes' mean losses."""
    class_means = []
    for chosen in sorted(set(labels)):
        losses = [
            -torch.log_softmax(row, dim=0)[label]
            for row, label in zip(logits, labels, strict=True)
            if label == chosen
        ]
        class_means.append(torch.stack(losses).mean())
    return torch.stack(class_means).mean()
