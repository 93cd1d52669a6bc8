"""Every loss as a function of states [B, T, D], labels [B, T] and a mask, beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from exitserve_training.losses import OutputHead, aligned_cross_entropy, layer_weights
from exitserve_training.losses import contrastive as pairwise
from exitserve_training.losses.headless import balanced_cross_entropy, contrastive_weight_tying
from exitserve_training.losses.implicit import nitp
from exitserve_training.losses.last_layer import cosine_alignment, kl_to_last
from exitserve_training.losses.reference import headless, implicit, last_layer, similarity
from exitserve_training.losses.reference import spread as spread_reference
from exitserve_training.losses.similarity import simreg
from exitserve_training.losses.spread import decorrelation, dispersion, l2_repel, orthogonalization

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDTH, VOCAB, LAYERS = 6, 3, 3

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

    return Case(called(nitp), called(implicit.nitp), torch.float32, FLOAT32, target_shift > 0)


def maps(number: int, out: int, dtype: torch.dtype) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return [torch.randn(WIDTH, out, generator=drawn).to(dtype) for _ in range(number)]


def of_layers(ours: Callable[..., Tensor], reference: Callable[..., Tensor]) -> Case:
    """Layers are maps of the states; references know no mask: they get what counts."""

    def layers(z: Tensor) -> list[Tensor]:
        return [z @ one for one in maps(LAYERS, WIDTH, z.dtype)]

    def plain(z: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        scale = layer_weights(range(1, LAYERS + 1))
        return reference([one[mask][None] for one in layers(z)], labels[mask], scale)

    return Case(
        lambda z, labels, mask: ours(layers(z), labels, mask),
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
    "simreg": of_pairs(simreg, similarity.simreg),
    "simreg, inner": of_pairs(simreg, similarity.simreg, similarity="inner", temperature=1.0),
    "simreg, mean": of_pairs(simreg, similarity.simreg, grouping="mean"),
    "simreg, label": of_pairs(simreg, similarity.simreg, grouping="label"),
    "simreg, chunks": of_pairs(simreg, similarity.simreg, chunk_size=3),
    "simreg, chunks by tokens": of_pairs(
        simreg, similarity.simreg, chunk_size=3, chunk_weights="tokens"
    ),
    "simcse": of_pairs(pairwise.simcse, similarity.simcse),
    "simcse, token": of_pairs(pairwise.simcse, similarity.simcse, level="token"),
    "cpretrain": of_pairs(pairwise.cpretrain, similarity.cpretrain),
    "creg": of_pairs(pairwise.creg, similarity.creg, temperature=0.5),
    "sce": of_pairs(pairwise.sce, similarity.sce, contrast=0.1, target_temperature=0.5),
    "dispersion": of_clouds(dispersion, spread_reference.dispersion, temperature=0.5),
    "orthogonalization": of_clouds(
        orthogonalization, spread_reference.orthogonalization, margin=0.7
    ),
    "l2_repel": of_clouds(l2_repel, spread_reference.l2_repel, temperature=2.0, norm_weight=1.5),
    "l2_repel, no self-pairs": of_clouds(l2_repel, spread_reference.l2_repel, self_pairs=False),
    "decorrelation": of_clouds(decorrelation, spread_reference.decorrelation),
    "decorrelation, features": of_clouds(
        decorrelation, spread_reference.decorrelation, between="features"
    ),
    "nitp, cosine": of_targets("cosine", 1),
    "nitp, mse": of_targets("mse", 0),
    "nitp, smooth_l1": of_targets("smooth_l1", 3),
    "nitp, kl": of_targets("kl", 1),
    "cosine": of_layers(
        lambda layers, labels, mask: cosine_alignment(layers, mask=mask),
        lambda layers, labels, scale: last_layer.cosine_alignment(layers, scale),
    ),
    "kl": of_layers(
        lambda layers, labels, mask: kl_to_last(
            layers, a_head(layers[0].dtype), mask=mask, temperature=3.0
        ),
        lambda layers, labels, scale: last_layer.kl_to_last(layers, a_head(), scale, 3.0),
    ),
    "aligned": of_layers(
        lambda layers, labels, mask: aligned_cross_entropy(
            layers, a_head(layers[0].dtype), labels, mask=mask
        ),
        all_logits,
    ),
    "weight tying": Case(
        lambda z, labels, mask: contrastive_weight_tying(
            *embedded(z, labels), target_ids=labels, mask=mask
        ),
        lambda z, labels, mask: headless.contrastive_weight_tying(
            *(one[mask] for one in embedded(z, labels)), labels[mask].tolist()
        ),
        torch.float32,
        FLOAT32,
        needs_pairs=False,
        half=1e-3,  # embeddings are rounded, too
    ),
    "balanced": Case(
        lambda z, labels, mask: balanced_cross_entropy(z, labels, mask=mask),
        lambda z, labels, mask: headless.balanced_cross_entropy(z[mask], labels[mask].tolist()),
        torch.float32,
        FLOAT32,
        needs_pairs=False,
    ),
}
