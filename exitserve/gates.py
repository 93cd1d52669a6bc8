"""Learned gates: small probes that predict, without logits, whether full depth would agree.

A gate reads a token's normed state at its exit layer, with D multiplications instead of the head's
D x V, and gives the probability that the greedy token is the same there and at full depth. In a
checkpoint whose criterion is its gates, that probability is the confidence, and only tokens that
exit read the head. `exitserve calibrate` fits gates and stores them beside the weights.

Shapes: N rows, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exitserve.calibration_record import GATES_FOLDER
from exitserve.errors import ExitServeError
from exitserve.files import replace_file
from exitserve.hub import hub_file
from exitserve.policy import ALWAYS, NEVER


@dataclass(frozen=True)
class Gate:
    """A linear probe on normed states."""

    weight: Tensor
    """[D] float32."""
    bias: Tensor
    """[] float32."""

    def confidence(self, normed: Tensor) -> Tensor:
        """[N] float32 probability that full depth agrees, from normed states [N, D]."""
        return torch.sigmoid(normed.float() @ self.weight + self.bias)

    def decided(self, normed: Tensor, *thresholds: Tensor) -> list[Tensor]:
        """Turns thresholds [N] for this gate into thresholds that always or never pass.

        With them an exit check on logits passes exactly the tokens that the gate passes.
        """
        confidence = self.confidence(normed)
        return [torch.where(confidence > each, ALWAYS, NEVER) for each in thresholds]

    def to(self, device: torch.device) -> Gate:
        """The same gate on a device."""
        return Gate(self.weight.to(device), self.bias.to(device))


Gates = Mapping[int, Gate]
"""By exit layer."""


def save_gates(model_dir: Path | str, gates: Gates) -> str:
    """Writes gates into a checkpoint, beside earlier ones.

    Returns:
        Their name for the checkpoint's block (`MultiExit.gates`), a hash of what was written.
    """
    from safetensors.torch import save

    tensors = {f"{layer}.weight": gate.weight.cpu().contiguous() for layer, gate in gates.items()}
    tensors |= {f"{layer}.bias": gate.bias.cpu().reshape(1) for layer, gate in gates.items()}
    data = save(tensors)
    name = hashlib.sha256(data).hexdigest()
    path = Path(model_dir) / GATES_FOLDER / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    replace_file(path, data)
    return name


def load_gates(
    model: Path | str, file: str, exit_layers: Sequence[int], revision: str | None = None
) -> dict[int, Gate]:
    """Reads the gates of a checkpoint directory or hub id, for these exit layers.

    Args:
        model: the directory, or a hub id.
        file: the one that the checkpoint names, see `MultiExit.gates_file`.
        exit_layers: whose gates are needed.
        revision: of a hub id.

    Raises:
        ExitServeError: there are none, their file is broken, or a layer has no gate.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(model) / file if Path(model).is_dir() else hub_file(str(model), file, revision)
    if not path.is_file():
        raise ExitServeError(
            f"the criterion of '{model}' is its gates, but it has no {file}: run exitserve "
            f"calibrate again, or copy that folder along with the checkpoint."
        )
    try:
        data = path.read_bytes()
        tensors = load(data)
    except (OSError, SafetensorError) as error:
        raise ExitServeError(f"'{path}' cannot be read ({error}); calibrate again.") from error
    # Earlier releases did not name the file by its contents.
    if path.stem not in ("gates", hashlib.sha256(data).hexdigest()):
        raise ExitServeError(
            f"'{path}' is not what was written (its name is the hash of its contents); copy it "
            f"again, or calibrate again."
        )
    known = sorted({int(name.partition(".")[0]) for name in tensors})
    missing = [layer for layer in exit_layers if layer not in known]
    if missing:
        raise ExitServeError(
            f"exit layer {missing[0]} has no gate, which is the criterion of '{model}'; layers "
            f"with gates: {', '.join(map(str, known))}. Leave --exit-layers out, or calibrate "
            f"with them."
        )
    return {
        layer: Gate(tensors[f"{layer}.weight"].float(), tensors[f"{layer}.bias"].float()[0])
        for layer in exit_layers
    }
