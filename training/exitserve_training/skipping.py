"""Positions that skip layers in training, as those that have exited do when the model is served.

A position that is frozen at an exit leaves every later layer as it came in, while the layer's keys
and values are computed from what came in: `hidden = where(skips, before, after)`. That is the
frozen row of the served model (docs/architecture.md), with gradient, so that the model meets in
training the propagated keys and values that it meets when served.

Shapes: B rows, T tokens, L layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exitserve_kernels.exit_check import check_logits
from exitserve_training.draws import row_generators
from exitserve_training.losses.head import Classifier
from exitserve_training.losses.head_losses import CHUNK_TOKENS
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.recipe import ExitAware


class SkipSampler:
    """Draws which positions may freeze, for each forward pass of a run."""

    def __init__(
        self, exit_aware: ExitAware, exit_layers: Sequence[int], num_layers: int, seed: int
    ) -> None:
        """Takes the recipe's settings; the exit layers are below the last."""
        self.exit_aware = exit_aware
        self.exit_layers = tuple(exit_layers)
        self.num_layers = num_layers
        self.seed = seed

    def draw(
        self, step: int, total_steps: int, input_ids: Tensor, labels: Tensor, mask: Tensor
    ) -> SkippedPositions | None:
        """Returns what may freeze in one pass over `input_ids` [B, T]; None before the start.

        In a share of the sequences, tokens behind a random prompt freeze above a threshold that is
        drawn for the sequence.

        Args:
            step: optimizer step, from 0.
            total_steps: of the run.
            input_ids: [B, T].
            labels: [B, T], shifted; -100 where nothing is predicted.
            mask: bool [B, T], tokens as opposed to padding.
        """
        aware = self.exit_aware
        if step / max(total_steps, 1) < aware.start:
            return None
        # A token may freeze if it is a target, that is, if the position before it has a label.
        is_target = torch.zeros(mask.shape, dtype=torch.bool)
        is_target[:, 1:] = labels.cpu()[:, :-1] != IGNORED
        allowed, thresholds = torch.zeros_like(is_target), []
        generators = row_generators("skipping", self.seed, step, input_ids, mask)
        for row, (generator, is_token) in enumerate(zip(generators, mask.cpu(), strict=True)):
            length = int(is_token.sum())
            takes_part, prompt, threshold = torch.rand(3, generator=generator).tolist()
            low, high = aware.thresholds
            thresholds.append(low + (high - low) * threshold)
            if takes_part < aware.share:
                # In plain text a random part of the sequence is prompt.
                first = int(prompt * aware.longest_prompt * length)
                allowed[row, is_token] = is_target[row, is_token] & (torch.arange(length) >= first)
        return SkippedPositions(
            self.exit_layers,
            self.num_layers,
            mask,
            allowed.to(mask.device),
            torch.tensor(thresholds, device=mask.device),
        )


class SkippedPositions:
    """Which positions of a batch skip which layers; exits are added as the pass reaches them."""

    def __init__(
        self,
        exit_layers: Sequence[int],
        num_layers: int,
        mask: Tensor,
        may_exit: Tensor,
        thresholds: Tensor,
    ) -> None:
        """Takes the exits below L, L, and what is drawn.

        Args:
            exit_layers: below the last.
            num_layers: L.
            mask: bool [B, T], tokens as opposed to padding.
            may_exit: bool [B, T], positions that freeze once they are confident.
            thresholds: [B], the confidence above which they freeze.
        """
        self.exit_layers = frozenset(exit_layers)
        self.num_layers = num_layers
        self.mask, self.may_exit, self.thresholds = mask, may_exit, thresholds
        self.depth = torch.full_like(mask, num_layers, dtype=torch.long)
        """[B, T]: the depth a position is frozen at."""
        self._decided: set[int] = set()

    def skips(self, layer: int) -> Tensor:
        """Bool [B, T]: positions that leave `layer` as they came in.

        The same when a checkpointed layer is run again in backward: what higher layers have
        decided meanwhile is at depths of `layer` or more.
        """
        return self.depth < layer

    @torch.no_grad()
    def freeze_confident(self, layer: int, hidden: Tensor, classifier: Classifier) -> None:
        """Freezes the confident positions of an exit layer, from its states `hidden` [B, T, D]."""
        if layer not in self.exit_layers or layer in self._decided:
            return
        self._decided.add(layer)
        rows = self.may_exit & (self.depth == self.num_layers)
        thresholds = self.thresholds[:, None].expand_as(rows)[rows]
        pieces = (torch.split(one, CHUNK_TOKENS) for one in (hidden.detach()[rows], thresholds))
        exits = [
            check_logits(classifier(states).float(), above).exits
            for states, above in zip(*pieces, strict=True)
        ]
        self.depth[rows] = torch.where(torch.cat(exits), layer, self.num_layers)

    def metrics(self) -> dict[str, Tensor]:
        """For the log: the share of tokens frozen, and the mean depth."""
        tokens = self.mask.sum()
        return {
            "frozen_share": ((self.depth < self.num_layers) & self.mask).sum() / tokens,
            "mean_depth": (self.depth * self.mask).sum() / tokens,
        }
