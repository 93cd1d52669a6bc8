"""Augmentation of training images: shift, mirror, turn.

What the aligned-training paper's appendix does for CIFAR-10 and ImageNet: random crop of a padded
image, horizontal flip with probability 0.5, rotation within 15 degrees. One resampling does all
three. Draws depend on the seed, the step and the image alone (`draws`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from exitserve_training.draws import row_generators


@dataclass(frozen=True)
class Augmentation:
    """How far images are changed."""

    seed: int
    shift: float = 0.125
    """At most this share of the side, in whole pixels; 4 of 32, as in the paper."""
    flip: float = 0.5
    """Chance of a mirrored image."""
    degrees: float = 15.0
    """Turned at most so far to either side."""

    def __call__(self, step: int, pixels: Tensor, values: Tensor) -> Tensor:
        """Returns `values` [B, C, H, W] changed; pixels from outside are 0, the mean.

        Args:
            step: the optimizer step.
            pixels: [B, C, H, W], by which each image has draws of its own.
            values: what to change, normalised.
        """
        rows = pixels.flatten(1)
        everything = torch.ones_like(rows, dtype=torch.bool)
        generators = row_generators("augmentation", self.seed, step, rows, everything)
        draws = torch.stack([torch.rand(4, generator=generator) for generator in generators])
        maps = self._maps(draws, values.shape[-2], values.shape[-1]).to(values)
        grid = functional.affine_grid(maps, list(values.shape), align_corners=False)
        return functional.grid_sample(values, grid, align_corners=False)

    def _maps(self, draws: Tensor, height: int, width: int) -> Tensor:
        """The affine maps [B, 2, 3] of draws [B, 4] in 0..1."""
        angle = (2.0 * draws[:, 0] - 1.0) * math.radians(self.degrees)
        mirror = torch.where(draws[:, 1] < self.flip, -1.0, 1.0)
        # One pixel is 2 / side in the coordinates of affine_grid, which run from -1 to 1.
        across, down = (
            torch.round((2.0 * draw - 1.0) * self.shift * side) * 2.0 / side
            for draw, side in ((draws[:, 2], width), (draws[:, 3], height))
        )
        first = torch.stack([angle.cos() * mirror, -angle.sin(), across], dim=1)
        second = torch.stack([angle.sin() * mirror, angle.cos(), down], dim=1)
        return torch.stack([first, second], dim=1)
