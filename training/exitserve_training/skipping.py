"""Positions that skip layers in training: exit-aware training and layer dropout.

Both are one operation. A position that skips layer l leaves it as it came in, while the layer's
keys and values are computed from what came in: `hidden = where(skips, before, after)`. That is
the frozen row of the served model (docs/architecture.md), with gradient.

Exit-aware training freezes positions at exit layers, so that the model meets in training the
propagated keys and values that it meets when served. Layer dropout (LayerSkip, Elhoushi et al.
2024, section 4.1) lets whole sequences skip a layer, deep ones more often.

Shapes: B rows, T tokens, L layers, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from exitserve_kernels.exit_check import check_logits
from exitserve_training.draws import row_generators
from exitserve_training.losses.head import Classifier
from exitserve_training.losses.head_losses import CHUNK_TOKENS
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.recipe import ExitAware, LayerDropout


class SkipSampler:
    """Draws which positions skip which layers, for each forward pass of a run."""

    def __init__(
        self,
        exit_aware: ExitAware | None,
        layer_dropout: LayerDropout | None,
        exit_layers: Sequence[int],
        num_layers: int,
        seed: int,
    ) -> None:
        """Takes the recipe's settings.

        Args:
            exit_aware: None for none.
            layer_dropout: None for none.
            exit_layers: below the last.
            num_layers: L.
            seed: the run's.
        """
        self.exit_aware = exit_aware
        self.layer_dropout = layer_dropout
        self.exit_layers = tuple(exit_layers)
        self.num_layers = num_layers
        self.seed = seed

    def draw(
        self, step: int, total_steps: int, input_ids: Tensor, labels: Tensor, mask: Tensor
    ) -> SkippedPositions | None:
        """Returns what skips in one pass over `input_ids` [B, T]; None if nothing does.

        Args:
            step: optimizer step, from 0.
            total_steps: of the run.
            input_ids: [B, T].
            labels: [B, T], shifted; -100 where nothing is predicted.
            mask: bool [B, T], tokens as opposed to padding.
        """
        progress = step / max(total_steps, 1)
        aware = self.exit_aware
        if aware is not None and progress < aware.start:
            aware = None
        if aware is None and self.layer_dropout is None:
            return None
        generators = row_generators("skipping", self.seed, step, input_ids, mask)
        skipped = SkippedPositions(self.exit_layers, self.num_layers, mask)
        if self.layer_dropout is not None:
            rates = dropout_rates(self.layer_dropout, self.num_layers, progress)
            drawn = torch.stack([torch.rand(self.num_layers, generator=g) for g in generators])
            skipped.dropped = (drawn < rates).to(mask.device)
        if aware is not None:
            _draw_freezing(skipped, aware, generators, labels, mask)
        return skipped


class SkippedPositions:
    """Which positions of a batch skip which layers; exits are added as the pass reaches them."""

    def __init__(self, exit_layers: Sequence[int], num_layers: int, mask: Tensor) -> None:
        self.exit_layers = frozenset(exit_layers)
        self.num_layers = num_layers
        self.mask = mask
        self.depth = torch.full_like(mask, num_layers, dtype=torch.long)
        """[B, T]: the depth a position is frozen at."""
        self.dropped: Tensor | None = None
        """Bool [B, L]: sequences that skip a layer."""
        self.may_exit: Tensor | None = None
        """Bool [B, T]: positions that freeze once they are confident; None if already drawn."""
        self.thresholds: Tensor | None = None
        """[B]: the confidence above which they freeze."""
        self._decided: set[int] = set()

    def skips(self, layer: int) -> Tensor:
        """Bool [B, T]: positions that leave `layer` as they came in.

        The same when a checkpointed layer is run again in backward: what higher layers have
        decided meanwhile is at depths of `layer` or more.
        """
        frozen = self.depth < layer
        if self.dropped is not None:
            frozen = frozen | self.dropped[:, layer - 1, None]
        return frozen

    @torch.no_grad()
    def freeze_confident(self, layer: int, hidden: Tensor, classifier: Classifier) -> None:
        """Freezes the confident positions of an exit layer, from its states `hidden` [B, T, D]."""
        if self.may_exit is None or layer not in self.exit_layers or layer in self._decided:
            return
        self._decided.add(layer)
        assert self.thresholds is not None
        rows = self.may_exit & (self.depth == self.num_layers)
        thresholds = self.thresholds[:, None].expand_as(rows)[rows]
        states = hidden.detach()[rows]
        bounds = [*range(0, len(states), CHUNK_TOKENS), len(states)]
        exits = [
            check_logits(classifier(states[start:end]).float(), thresholds[start:end]).exits
            for start, end in pairwise(bounds)
        ]
        if exits:
            self.depth[rows] = torch.where(torch.cat(exits), layer, self.num_layers)

    def metrics(self) -> dict[str, Tensor]:
        """For the log: the share of tokens frozen, the mean depth, the share of layers dropped."""
        tokens = self.mask.sum()
        found = {
            "frozen_share": ((self.depth < self.num_layers) & self.mask).sum() / tokens,
            "mean_depth": (self.depth * self.mask).sum() / tokens,
        }
        if self.dropped is not None:
            found["dropped_share"] = self.dropped.float().mean()
        return found


def dropout_rates(options: LayerDropout, num_layers: int, progress: float) -> Tensor:
    """LayerSkip's rates [L]: rate * S(t) * D(l), D from 0 at the first layer to 1 at the last.

    D(l) = exp(l ln 2 / (L - 1)) - 1 for l = 0..L-1; S(t) = exp(t ln 2 / (T - 1)) - 1 with
    `curriculum` (its choice for pretraining), else 1 (for fine-tuning).
    """
    scale = math.exp(progress * math.log(2)) - 1.0 if options.curriculum else 1.0
    places = torch.arange(num_layers) / max(num_layers - 1, 1)
    return options.rate * scale * ((places * math.log(2)).exp() - 1.0)


def _draw_freezing(
    skipped: SkippedPositions,
    aware: ExitAware,
    generators: Sequence[torch.Generator],
    labels: Tensor,
    mask: Tensor,
) -> None:
    exits = torch.tensor(sorted(skipped.exit_layers))
    # A token may freeze if it is a target, that is, if the position before it has a label.
    is_target = torch.zeros(mask.shape, dtype=torch.bool)
    is_target[:, 1:] = labels.cpu()[:, :-1] != IGNORED
    allowed, thresholds = torch.zeros_like(is_target), []
    depths = torch.full(mask.shape, skipped.num_layers)
    # No draws for padding, whose amount depends on the rest of the batch.
    for row, (generator, is_token) in enumerate(zip(generators, mask.cpu(), strict=True)):
        length = int(is_token.sum())
        takes_part, prompt, threshold = torch.rand(3, generator=generator).tolist()
        low, high = aware.thresholds
        thresholds.append(low + (high - low) * threshold)
        if takes_part < aware.share:
            # In plain text a random part of the sequence is prompt.
            first = int(prompt * aware.longest_prompt * length)
            allowed[row, is_token] = is_target[row, is_token] & (torch.arange(length) >= first)
        frozen = torch.rand(length, generator=generator) < aware.fraction
        drawn = exits[torch.randint(len(exits), (length,), generator=generator)]
        depths[row, is_token] = torch.where(frozen, drawn, skipped.num_layers)
    if aware.select == "confidence":
        skipped.may_exit = allowed.to(mask.device)
        skipped.thresholds = torch.tensor(thresholds, device=mask.device)
    else:
        skipped.depth = torch.where(allowed, depths, skipped.num_layers).to(mask.device)
