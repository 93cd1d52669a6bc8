"""The least that the parts of a step cost on accelerators, by the vendors' figures.

    seconds of a part = max(bytes it reads / bandwidth, arithmetic / peak)

A bound, not a measurement: no launches, no engine. The figures are the vendors' peaks for dense
bfloat16 and for memory bandwidth, **unverified**.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exitserve.costs import DecoderShape
from exitserve.errors import ExitServeError, nearest
from exitserve.step_costs.curves import Curve, StepCosts

FIGURES_NOTE = "vendors' figures, unverified"


@dataclass(frozen=True)
class Device:
    """A vendor's figures for an accelerator."""

    bandwidth: float
    """Bytes a second."""
    peak: float
    """Floating-point operations a second, dense bfloat16."""


DEVICES = {
    "b200": Device(8.0e12, 2250e12),
    "h200": Device(4.8e12, 989e12),
    "h100": Device(3.35e12, 989e12),
    "a100-80g": Device(2.0e12, 312e12),
    "a100-40g": Device(1.55e12, 312e12),
    "l40s": Device(0.864e12, 362e12),
    "l4": Device(0.3e12, 121e12),
    "rtx4090": Device(1.0e12, 165e12),
    "rtx3090": Device(0.936e12, 71e12),
}


def device_named(name: str) -> Device:
    """Looks up a device; raises `ExitServeError` if the table does not have it."""
    if name not in DEVICES:
        raise ExitServeError(
            f"--device {name!r} is unknown.{nearest(name, DEVICES)} Known: {', '.join(DEVICES)}; "
            f"without --device this machine is measured."
        )
    return DEVICES[name]


def device_called(name: str) -> str | None:
    """The table's name of a device that its driver calls `name`; None if it is not there."""
    words = name.lower().replace("80gb", "80g").replace("40gb", "40g").replace("rtx ", "rtx")
    found = [key for key in DEVICES if all(part in words for part in key.split("-"))]
    return max(found, key=len, default=None)  # "l40s" rather than "l4"


def roofline(shape: DecoderShape, device: Device, context: int, largest: int) -> StepCosts:
    """The least time that the parts of a step take.

    Args:
        shape: the decoder.
        device: the figures.
        context: tokens that each row's attention reads.
        largest: most rows for which times are needed.
    """

    def curve(seconds: Callable[[int], float]) -> Curve:
        return Curve(tuple((rows, seconds(rows)) for rows in range(1, largest + 1)))

    def product(weights: int) -> Curve:
        """Reading `weights` bytes, or two operations for each of their numbers and each row."""
        flops = 2 * weights / shape.dtype_bytes
        return curve(lambda rows: max(weights / device.bandwidth, rows * flops / device.peak))

    cache = context * shape.kv_token_bytes
    # Scores, then the sum over values: two products of [heads, head_dim] with [head_dim, context].
    flops = 4 * context * shape.num_heads * shape.head_dim
    head = product(shape.head_bytes)
    return StepCosts(
        num_layers=shape.num_layers,
        matrices=product(shape.layer_bytes),
        attention=curve(lambda rows: rows * max(cache / device.bandwidth, flops / device.peak)),
        fill=product(shape.kv_projection_bytes),
        check=head,
        head=head,
        rest=curve(lambda rows: 0.0),
        exits=curve(lambda rows: 0.0),
    )
