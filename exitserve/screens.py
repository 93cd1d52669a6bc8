"""Screens: small networks that tell which exit checks are worth a read of the LM head.

A check that fails has read the whole head in vain, as much as several layers on models with a
large vocabulary. A screen reads a token's normed state at its exit layer, with about D / 8 times D
multiplications instead of the head's D times V, and predicts how confident the head will be. Only
where a check is then likely enough to pass to be worth its price is the head read, and it alone
decides: a screen adds no wrong exit, it can only miss one.

What a screen says depends on the token alone: not on the request's earlier tokens, and not on the
batch. `exitserve calibrate` fits screens and stores them beside the weights.

Shapes: N rows, D hidden, H inner width of a screen, K knots.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from exitserve.checkpoint.calibration import SCREENS_FOLDER
from exitserve.checkpoint.files import replace_file
from exitserve.checkpoint.hub import hub_file
from exitserve.errors import ExitServeError
from exitserve.policy import ALWAYS, NEVER

KNOTS = (0.005, 0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Thresholds for which the chance to pass is measured; for others it is interpolated."""


@dataclass(frozen=True)
class Screen:
    """A network D -> H -> 1 on normed states, and what its score means. All are float32."""

    inner: Tensor
    """[H, D] weights of the first layer."""
    inner_bias: Tensor
    """[H]."""
    outer: Tensor
    """[H] weights of the second."""
    outer_bias: Tensor
    """[1]."""
    slope: Tensor
    """[K]: a check at threshold `KNOTS[k]` passes with probability
    sigmoid(slope[k] * score + offset[k])."""
    offset: Tensor
    """[K]."""

    def score(self, normed: Tensor) -> Tensor:
        """[N] float32 scores of normed states [N, D]: the higher, the more confident."""
        inner = torch.addmm(self.inner_bias, normed.float(), self.inner.mT)
        return torch.mv(inner.relu_(), self.outer).add_(self.outer_bias)

    def least_score(self, threshold: float, break_even: float) -> float:
        """The score above which a check at a threshold is worth its price.

        Args:
            threshold: of the check.
            break_even: the chance to pass from which it pays (`byte_costs.break_even`).
        """
        if threshold == ALWAYS:
            return -math.inf
        if threshold >= NEVER:
            return math.inf
        slope, offset = self._at(threshold)
        wanted = _logit(break_even)
        if slope <= 0.0:  # the score says nothing at this threshold
            return -math.inf if offset > wanted else math.inf
        return (wanted - offset) / slope

    def chance(self, score: Tensor, threshold: float) -> Tensor:
        """[N] probability that a check at a threshold passes, from scores [N]."""
        slope, offset = self._at(threshold)
        return torch.sigmoid(slope * score + offset)

    def _at(self, threshold: float) -> tuple[float, float]:
        """Slope and offset between the knots, by the threshold's logit."""
        own = _logit(min(max(threshold, KNOTS[0]), KNOTS[-1]))
        knots = [_logit(one) for one in KNOTS]
        upper = next(index for index in range(1, len(knots)) if own <= knots[index])
        share = (own - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
        slope, offset = (
            float(values[upper - 1]) * (1.0 - share) + float(values[upper]) * share
            for values in (self.slope, self.offset)
        )
        return slope, offset

    def to(self, device: torch.device) -> Screen:
        """The same screen on a device."""
        return Screen(*(getattr(self, one.name).to(device) for one in fields(self)))


Screens = Mapping[int, Screen]
"""By exit layer; at others every check is made."""


def _logit(share: float) -> float:
    return math.log(share / (1.0 - share))


def save_screens(model_dir: Path | str, screens: Screens) -> str:
    """Writes screens into a checkpoint, beside earlier ones.

    Returns:
        Their name for the checkpoint's block (`MultiExit.screens`), a hash of what was written.
    """
    from safetensors.torch import save

    tensors = {
        f"{layer}.{one.name}": getattr(screen, one.name).cpu().contiguous().clone()
        for layer, screen in screens.items()
        for one in fields(screen)
    }
    data = save(tensors)
    name = hashlib.sha256(data).hexdigest()
    path = Path(model_dir) / SCREENS_FOLDER / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    replace_file(path, data)
    return name


def load_screens(
    model: Path | str, file: str, exit_layers: Collection[int], revision: str | None = None
) -> dict[int, Screen]:
    """Reads the screens of a checkpoint directory or hub id, those of these exit layers.

    Args:
        model: the directory, or a hub id.
        file: the one that the checkpoint names, see `MultiExit.screens_file`.
        exit_layers: whose screens are wanted; those without one are left out.
        revision: of a hub id.

    Raises:
        ExitServeError: there is no such file, or it is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(model) / file if Path(model).is_dir() else hub_file(str(model), file, revision)
    if not path.is_file():
        raise ExitServeError(
            f"the config.json of '{model}' names screens, but there is no {file}: copy that folder "
            f"along with the checkpoint, or run exitserve calibrate again."
        )
    try:
        data = path.read_bytes()
        tensors = load(data)
    except (OSError, SafetensorError) as error:
        raise ExitServeError(f"'{path}' cannot be read ({error}); calibrate again.") from error
    if path.stem != hashlib.sha256(data).hexdigest():
        raise ExitServeError(
            f"'{path}' is not what was written (its name is the hash of its contents); copy it "
            f"again, or calibrate again."
        )
    known = {int(name.partition(".")[0]) for name in tensors}
    return {
        layer: Screen(*(tensors[f"{layer}.{one.name}"].float() for one in fields(Screen)))
        for layer in sorted(known & set(exit_layers))
    }
