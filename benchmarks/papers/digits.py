"""The aligned-training paper's MLPs of 9 layers, on scikit-learn's digits instead of MNIST.

    python benchmarks/papers/digits.py

With and without residual connections, plain and aligned: similarity of layers (its figure 11), the
norm ratio (figure 10), principal components of class means (figure 1), convergence (figure 4b).
Three seeds a variant; results go to docs/papers/results.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from study import RESULTS, seeds_of, write_results
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.inspect.similarity import centred, cka_matrix, cos_matrix, cosines
from exitserve_training.layer_weights import layer_weights

LAYERS = 9
HIDDEN = 64
STEPS = 600
MEASURED = 20
"""The training loss is measured each so many steps."""
VARIANTS = {
    "no residual, plain": (False, False),
    "no residual, aligned": (False, True),
    "residual, plain": (True, False),
    "residual, aligned": (True, True),
}
"""Whether layers have a residual connection, and whether training is aligned."""


class MLP(nn.Module):
    """Layers of one width between a linear map of the pixels and a classifier."""

    def __init__(self, has_residual: bool) -> None:
        """Takes whether a layer adds to its input, or replaces it."""
        super().__init__()
        self.has_residual = has_residual
        self.first = nn.Linear(64, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.classifier = nn.Linear(HIDDEN, 10)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The states [N, D] before the first layer and after each."""
        states = [self.first(pixels)]
        for layer in self.layers:
            added = functional.relu(layer(states[-1]))
            states.append(states[-1] + added if self.has_residual else added)
        return states


def run(has_residual: bool, is_aligned: bool, seed: int) -> dict[str, Any]:
    """Trains one MLP and measures it."""
    torch.manual_seed(seed)
    pixels, classes = (torch.tensor(one) for one in load_digits(return_X_y=True))
    split = train_test_split(pixels.float() / 16, classes, test_size=500, random_state=0)
    train, test, train_classes, test_classes = split
    model = MLP(has_residual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = layer_weights(range(1, LAYERS + 1))
    curve = {}
    for step in range(STEPS + 1):
        if step % MEASURED == 0:
            with torch.no_grad():
                logits = model.classifier(model(train)[-1])
            curve[str(step)] = round(float(functional.cross_entropy(logits, train_classes)), 5)
        rows = torch.randint(len(train), (64,))
        losses = [
            functional.cross_entropy(model.classifier(states), train_classes[rows])
            for states in model(train[rows])[1:]
        ]
        # Alternating with plain steps, as the paper does.
        reads_all = is_aligned and step % 2 == 0
        weighted = sum(w * one for w, one in zip(weights, losses, strict=True))
        optimizer.zero_grad()
        loss = torch.as_tensor(weighted if reads_all else losses[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        states = model(test)
        return {"curve": curve, **_measured(model, states, test_classes)}


def _measured(model: MLP, states: list[Tensor], classes: Tensor) -> dict[str, Any]:
    """By depth, of states [N, D] before the first layer and after each."""
    cos, cka = cos_matrix(states), cka_matrix(states)
    layers = {}
    for depth in range(1, LAYERS + 1):
        before, after = states[depth - 1], states[depth]
        added = after - before if model.has_residual else after
        right = model.classifier(after).argmax(-1) == classes
        layers[str(depth)] = {
            "accuracy": round(float(right.double().mean()), 5),
            "cos": round(float(cos[depth, -1]), 4),
            "cka": round(float(cka[depth, -1]), 4),
            "cos_before": round(float(cos[depth, depth - 1]), 4),
            "norm_ratio": round(float((before.norm(dim=1) / added.norm(dim=1)).mean()), 4),
            "cos_added": round(float(cosines(before, added).mean()), 4),
        }
    return {"layers": layers, "two_components": round(_two_components(states[1:], classes), 4)}


def _two_components(states: list[Tensor], classes: Tensor) -> float:
    """The share of the variance of all layers' class means that two components explain."""
    every = [centred(one) for one in states]
    means = torch.cat([one[classes == kind].mean(0)[None] for one in every for kind in range(10)])
    variances = torch.linalg.svdvals(centred(means)).square()
    return float(variances[:2].sum() / variances.sum())


if __name__ == "__main__":
    write_results(
        RESULTS / "aligned-digits.json",
        {
            f"{name}/{seed}": run(has_residual, is_aligned, seed)
            for seed, name, (has_residual, is_aligned) in seeds_of(VARIANTS)
        },
    )
