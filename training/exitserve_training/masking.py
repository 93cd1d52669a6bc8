"""Masked language modelling: which tokens are masked, and what replaces them.

BERT's rule (Devlin et al. 2019, section 3.1): 15 % of the tokens are targets; of those 80 %
become the mask token, 10 % a random one, 10 % stay. The transformers collator does the same from
the process's generator; here the draw belongs to the sequence and the step (`draws`), so that
runs resume and split over processes exactly, and every evaluation masks the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exitserve_training.draws import row_generators
from exitserve_training.losses.tokens import IGNORED

REPLACED, RANDOM = 0.8, 0.9
"""A uniform draw below the first gives the mask token, below the second a random token."""


@dataclass(frozen=True)
class Masking:
    """Masks tokens for masked language models."""

    share: float
    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    """Never masked, and never drawn as random token."""
    seed: int

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
