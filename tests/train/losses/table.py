"""Every loss as a function of states [B, T, D], labels [B, T] and a mask, beside its reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.losses import (
    OutputHead,
    aligned_cross_entropy,
    cosine_alignment,
    cpretrain,
    creg,
    decorrelation,
    dispersion,
    l2_repel,
    layer_weights,
    nitp,
    orthogonalization,
    sce,
    simcse,
    simreg,
)
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying

from . import references

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDTH, VOCAB, LAYERS = 6, 3, 3
SCALE = dict(enumerate(layer_weights(range(1, LAYERS + 1)), start=1))

# Both sides are float32 and differ in the order of sums of a few dozen terms: some 1e-7 each.
FLOAT32 = {"rtol": 5e-5, "atol": 5e-6}
# Rounding errors of 2e-16, times 1 / temperature twice; and softplus, taken as the identity above
# 20, is there off by e^-20 = 2e-9.
FLOAT64 = {"rtol": 1e-8, "atol": 1e-8}


@dataclass(frozen=True)
class Case:
    """A loss, its reference, and what is known of both."""

    ours: Loss
    reference: Loss
    dtype: torch.dtype = torch.float64
    close: dict[str, float] = field(default_factory=lambda: FLOAT64)
    needs_pairs: bool = True
    """One token of a row has nothing to be compared with: the loss is 0."""
    half: float = 0.0
    """How far the loss of bfloat16 states may be from that of the same numbers in float32."""


def of_pairs(ours: Callable[..., Tensor], reference: Callable[..., Tensor], **options: Any) -> Case:
    def called(loss: Callable[..., Tensor]) -> Loss:
        return lambda z, labels, mask: loss(z, labels, mask=mask, **options)

    return Case(called(ours), called(reference))


def of_clouds(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], **options: Any
) -> Case:
    def called(loss: Callable[..., Tensor]) -> Loss:
        return lambda z, labels, mask: loss(z, mask=mask, **options)

    # Of float32: an arc cosine is off by its argument's 1e-7 / sin(angle).
    return Case(called(ours), called(reference), torch.float32, FLOAT32)


def of_targets(distance: Any, target_shift: int) -> Case:
    """The targets are the states, reversed."""

    def called(loss: Callable[..., Tensor]) -> Loss:
        options = {"target_shift": target_shift, "distance": distance}
        return lambda z, labels, mask: loss(
            z, z.detach().flip(2), lambda states: states, mask=mask, **options
        )

    return Case(called(nitp), called(references.nitp), torch.float32, FLOAT32, target_shift > 0)


def maps(number: int, out: int, dtype: torch.dtype) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return [torch.randn(WIDTH, out, generator=drawn).to(dtype) for _ in range(number)]


def of_layers(ours: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Case:
    """Layers are maps of the states; references know no mask: they get what counts."""

    def layers(z: Tensor) -> list[Tensor]:
        return [z @ one for one in maps(LAYERS, WIDTH, z.dtype)]

    def plain(z: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        kept = [one[mask][None] for one in layers(z)]
        return reference(kept, labels[mask], list(SCALE.values()))

    return Case(
        lambda z, labels, mask: ours(dict(enumerate(layers(z), 1)), labels, mask),
        plain,
        torch.float32,
        FLOAT32,
        needs_pairs=False,
        # Maps and the head are products in bfloat16: 8 bits of logits of size 1.
        half=2e-2,
    )


def a_head(dtype: torch.dtype = torch.float32) -> OutputHead:
    torch.manual_seed(1)
    head = OutputHead(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))
    head.norm.to(dtype)
    head.linear.to(dtype)
    return head


def all_logits(layers: list[Tensor], labels: Tensor, scale: list[float]) -> Tensor:
    """The aligned loss by its definition, all logits at once."""
    losses = [functional.cross_entropy(a_head()(one[0]), labels) for one in layers]
    return torch.stack([weight * loss for weight, loss in zip(scale, losses, strict=True)]).sum()


def embedded(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and an embedding for each label."""
    return z, maps(1, WIDTH, z.dtype)[0][labels.clamp_min(0)]


CASES: dict[str, Case] = {
    "simreg": of_pairs(simreg, references.simreg),
    "simreg, inner": of_pairs(simreg, references.simreg, similarity="inner", temperature=1.0),
    "simreg, chunks": of_pairs(simreg, references.simreg, chunk_size=3),
    "simcse": of_pairs(simcse, references.simcse),
    "cpretrain": of_pairs(cpretrain, references.cpretrain),
    "creg": of_pairs(creg, references.creg, temperature=0.5),
    "sce": of_pairs(sce, references.sce, contrast=0.1, target_temperature=0.5),
    "dispersion": of_clouds(dispersion, references.dispersion, temperature=0.5),
    "orthogonalization": of_clouds(orthogonalization, references.orthogonalization, margin=0.7),
    "l2_repel": of_clouds(l2_repel, references.l2_repel, temperature=2.0, norm_weight=1.5),
    "l2_repel, no self-pairs": of_clouds(l2_repel, references.l2_repel, self_pairs=False),
    "decorrelation": of_clouds(decorrelation, references.decorrelation),
    "decorrelation, features": of_clouds(
        decorrelation, references.decorrelation, between="features"
    ),
    "nitp, cosine": of_targets("cosine", 1),
    "nitp, mse": of_targets("mse", 0),
    "cosine": of_layers(
        lambda layers, labels, mask: cosine_alignment(layers, SCALE, mask=mask),
        lambda layers, labels, scale: references.cosine_alignment(layers, scale),
    ),
    "aligned": of_layers(
        lambda layers, labels, mask: aligned_cross_entropy(
            layers, a_head(layers[1].dtype), labels.masked_fill(~mask, -100), SCALE
        )[0],
        all_logits,
    ),
    "weight tying": Case(
        lambda z, labels, mask: contrastive_weight_tying(
            *(one[mask] for one in embedded(z, labels))
        ),
        lambda z, labels, mask: references.contrastive_weight_tying(
            *(one[mask] for one in embedded(z, labels))
        ),
        torch.float32,
        FLOAT32,
        needs_pairs=False,
        half=1e-3,  # embeddings are rounded, too
    ),
    "balanced": Case(
        lambda z, labels, mask: balanced_cross_entropy(z, labels.masked_fill(~mask, -100)),
        lambda z, labels, mask: references.balanced_cross_entropy(z[mask], labels[mask].tolist()),
        torch.float32,
        FLOAT32,
        needs_pairs=False,
    ),
}
