"""Linear probes of layers, and the smallest depth for a share of full accuracy.

Aligned-training paper, section 3: layer-wise linear probing and the minimal number of layers.
N training samples, M test samples, D hidden.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

MAX_ITERATIONS = 300
"""Of L-BFGS; classes that overlap little, much or wholly take 13 to 160, D up to 256."""


def linear_probe(
    train_features: Tensor, train_classes: Tensor, test_features: Tensor, test_classes: Tensor
) -> float:
    """Returns the share of test samples that a linear classifier of the features gets right.

    A logistic regression with the L2 penalty that is scikit-learn's default (C = 1), by L-BFGS in
    float64, on features standardised with the training samples' means and deviations. The papers
    name no settings. (scikit-learn itself is not used: wherever it is installed, transformers
    imports it, which made every command start 1.8 s later.)

    Args:
        train_features: finite [N, D].
        train_classes: integers [N], of at least two classes.
        test_features: finite [M, D].
        test_classes: integers [M]; a class that no training sample has is always missed.
    """
    train, test = _standardised(train_features, test_features)
    names, targets = torch.unique(train_classes.cpu(), return_inverse=True)
    weight, bias = _logistic_regression(train, targets, len(names))
    predicted = names[(test @ weight + bias).argmax(1)]
    return float((predicted == test_classes.cpu()).double().mean())


def _standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, by the training samples' means and deviations."""
    train, test = (one.detach().to("cpu", torch.float64) for one in (train, test))
    mean, spread = train.mean(0), train.std(0, correction=0)
    spread = spread.where(spread > 0, 1.0)
    return (train - mean) / spread, (test - mean) / spread


def _logistic_regression(features: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weights [D, count] and biases [count] with the least penalised loss."""
    weight = torch.zeros(features.shape[1], count, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        solver.zero_grad()
        fit = functional.cross_entropy(features @ weight + bias, targets)
        penalised = fit + weight.square().sum() / (2 * len(targets))
        penalised.backward()  # type: ignore[no-untyped-call]
        return penalised.item()

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def minimal_depth(accuracies: Mapping[int, float], share: float) -> int:
    """Returns the smallest depth whose accuracy is at least `share` times the last layer's.

    Deeper layers can be less accurate again.
    """
    # 0.7 * 0.1 is more than 0.07 in floating point; accuracies are counts, further apart.
    wanted = share * accuracies[max(accuracies)] - 1e-12
    return min(depth for depth, accuracy in accuracies.items() if accuracy >= wanted)
