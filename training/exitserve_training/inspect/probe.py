"""Linear probes of layers, and the smallest depth for a share of full accuracy.

Aligned-training paper, section 3: layer-wise linear probing and the minimal number of layers.
N training samples, M test samples, D hidden.
"""

from collections.abc import Mapping

from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

MAX_ITERATIONS = 1000
"""Of L-BFGS; scikit-learn warns where they were too few."""


def linear_probe(
    train_features: Tensor, train_classes: Tensor, test_features: Tensor, test_classes: Tensor
) -> float:
    """Returns the share of test samples that a linear classifier of the features gets right.

    Logistic regression with scikit-learn's default penalty (C = 1), on features standardised with
    the training samples' means and deviations. The papers name no settings.

    Args:
        train_features: finite [N, D].
        train_classes: integers [N], of at least two classes.
        test_features: finite [M, D].
        test_classes: integers [M]; a class that no training sample has is always missed.
    """
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=MAX_ITERATIONS))
    train, test = (one.detach().cpu().double().numpy() for one in (train_features, test_features))
    probe.fit(train, train_classes.cpu().numpy())
    return float(probe.score(test, test_classes.cpu().numpy()))


def minimal_depth(accuracies: Mapping[int, float], share: float) -> int:
    """Returns the smallest depth whose accuracy is at least `share` times the last layer's.

    Deeper layers can be less accurate again.
    """
    # 0.7 * 0.1 is more than 0.07 in floating point; accuracies are counts, further apart.
    wanted = share * accuracies[max(accuracies)] - 1e-12
    return min(depth for depth, accuracy in accuracies.items() if accuracy >= wanted)
