"""Random draws that depend on the seed, the step and the sequence alone.

Neither the split into batches and processes nor a resumed run changes them, as it would those
of one generator for the process. Drawn so are the tokens that are masked, how images are augmented,
and which positions may freeze (`skipping`).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import IGNORED

REPLACED, RANDOM = 0.8, 0.9
"""A uniform draw below the first gives the mask token, below the second a random token."""


def row_generators(
    purpose: str, seed: int, step: int, input_ids: Tensor, mask: Tensor
) -> list[torch.Generator]:
    """One CPU generator for each sequence of `input_ids` [B, T].

    Args:
        purpose: what is drawn, so that different draws of a step differ.
        seed: the run's.
        step: the optimizer step.
        input_ids: the sequences, before anything is changed in them.
        mask: bool [B, T], tokens as opposed to padding, whose amount depends on the batch.
    """
    generators = []
    for row, is_token in zip(input_ids.cpu(), mask.cpu(), strict=True):
        own = zlib.crc32(row[is_token].numpy().tobytes())
        key = zlib.crc32(f"{purpose} {seed} {step} {own}".encode())
        generators.append(torch.Generator().manual_seed(key))
    return generators


@dataclass(frozen=True)
class Masking:
    """Masks tokens for masked language models, by BERT's rule (Devlin et al. 2019, section 3.1).

    15 % of the tokens are targets; of those 80 % become the mask token, 10 % a random one, 10 %
    stay. The transformers collator does the same from the process's generator; here runs resume
    and split over processes exactly, and every evaluation masks the same tokens.
    """

    share: float
    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    """Never masked, and never drawn as random token."""
    seed: int

    @classmethod
    def of(cls, tokenizer: Any, share: float, seed: int) -> Masking:
        """Masks a share of a tokenizer's tokens; raises `ExitServeError` without a mask token."""
        if tokenizer.mask_token_id is None:
            raise ExitServeError(
                "this tokenizer has no mask token, which a masked language model needs; set "
                "tokenizer.path to that of a masked model."
            )
        special = tuple(tokenizer.all_special_ids)
        return cls(share, int(tokenizer.mask_token_id), len(tokenizer), special, seed)

    def __call__(self, step: int, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs with tokens masked, and the labels: both [B, T].

        Args:
            step: the optimizer step.
            input_ids: [B, T].
            mask: bool [B, T], tokens as opposed to padding.
        """
        generators = row_generators("masking", self.seed, step, input_ids, mask)
        draws = torch.zeros(2, *mask.shape)
        tokens = torch.zeros(mask.shape, dtype=torch.long)
        # No draws for padding, whose amount depends on the rest of the batch.
        for row, (generator, is_token) in enumerate(zip(generators, mask.cpu(), strict=True)):
            length = int(is_token.sum())
            draws[:, row, is_token] = torch.rand(2, length, generator=generator)
            tokens[row, is_token] = torch.randint(self.vocab_size, (length,), generator=generator)
        chosen, how = draws.to(input_ids.device)
        random = tokens.to(input_ids.device)
        special = torch.tensor(self.special_ids, device=input_ids.device)
        hidden = (chosen < self.share) & mask & ~torch.isin(input_ids, special)
        random = torch.where(torch.isin(random, special), input_ids, random)
        instead = torch.where(how < RANDOM, random, input_ids)
        instead = torch.where(how < REPLACED, self.mask_id, instead)
        labels = torch.where(hidden, input_ids, IGNORED)
        return torch.where(hidden, instead, input_ids), labels


@dataclass(frozen=True)
class Augmentation:
    """Shifts, mirrors and turns training images, all three by one resampling.

    What the aligned-training paper's appendix does for CIFAR-10 and ImageNet: random crop of a
    padded image, horizontal flip with probability 0.5, rotation within 15 degrees.
    """

    seed: int
    shift: float = 0.125
    """At most this share of the side, in whole pixels; 4 of 32, as in the paper."""
    flip: float = 0.5
    """Chance of a mirrored image."""
    degrees: float = 15.0
    """Turned at most so far to either side."""

    def __call__(self, step: int, pixels: Tensor) -> Tensor:
        """Returns `pixels` [B, C, H, W] changed; those from outside are 0, the mean.

        Args:
            step: the optimizer step.
            pixels: normalised; each image has draws of its own by them.
        """
        rows = pixels.flatten(1)
        everything = torch.ones_like(rows, dtype=torch.bool)
        generators = row_generators("augmentation", self.seed, step, rows, everything)
        draws = torch.stack([torch.rand(4, generator=generator) for generator in generators])
        maps = self._maps(draws, pixels.shape[-2], pixels.shape[-1]).to(pixels)
        grid = functional.affine_grid(maps, list(pixels.shape), align_corners=False)
        return functional.grid_sample(pixels, grid, align_corners=False)

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
