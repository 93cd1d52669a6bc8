"""What the parts of a step cost, without timing them.

On accelerators the least, by the vendors' figures, and where a model is served not less than
launching its kernels takes (`with_launches`):

    seconds of a part = max(bytes it reads / bandwidth, arithmetic / peak)

A bound, not a measurement. The figures are the vendors' peaks for dense bfloat16 and for memory
bandwidth, **unverified**.

On a CPU arithmetic is not free, however few rows there are:

    seconds of a part = bytes it reads / bandwidth * (1 + share of a row * (rows - 1))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from exitserve.costs.byte_costs import DecoderShape
from exitserve.costs.curves import Curve, StepCosts
from exitserve.errors import ExitServeError, nearest

FIGURES = "peak figures, unverified"


@dataclass(frozen=True)
class Device:
    """A vendor's figures for an accelerator."""

    bandwidth: float
    """Bytes a second."""
    peak: float
    """Floating-point operations a second, dense bfloat16; float16 where a card has no bfloat16."""
    called: tuple[str, ...] = ()
    """Other names that drivers have for it, as `device_called` reads them."""

    def __str__(self) -> str:
        return f"a card of {self.bandwidth / 1e9:,g} GB/s and {self.peak / 1e12:g} TFLOP/s"


V100 = tuple(f"v100-{kind}gb" for kind in ("sxm2-16", "sxm2-32", "sxm3-32", "pcie-16", "pcie-32"))
RTX_PRO_6000 = tuple(f"rtxpro-6000-blackwell-{kind}workstation-edition" for kind in ("", "max-q-"))
DEVICES = {
    "b300": Device(8.0e12, 2250e12, ("b300-sxm6-ac", "gb300")),
    "b200": Device(8.0e12, 2250e12, ("gb200",)),
    "gh200": Device(4.0e12, 989e12, ("gh200-480gb", "gh200-120gb")),
    "gh200-144g": Device(4.9e12, 989e12, ("gh200-144g-hbm3e",)),
    "h200": Device(4.8e12, 989e12),
    "h200-nvl": Device(4.8e12, 835e12),
    "h100": Device(3.35e12, 989e12, ("h100-80gb-hbm3", "h800")),
    "h100-nvl": Device(3.9e12, 835e12, ("h800-nvl",)),
    "h100-pcie": Device(2.0e12, 756e12, ("h800-pcie",)),
    "h20": Device(4.0e12, 148e12),
    "h20-3e": Device(4.8e12, 148e12),
    "a100-80g": Device(2.0e12, 312e12, ("a100-sxm4-80gb", "a100-80gb-pcie", "a800-sxm4-80gb")),
    "a100-40g": Device(1.55e12, 312e12, ("a100-sxm4-40gb", "a100-pcie-40gb")),
    "a40": Device(0.696e12, 150e12),
    "a30": Device(0.933e12, 165e12),
    "a10": Device(0.6e12, 125e12),
    "a10g": Device(0.6e12, 70e12),
    "l40s": Device(0.864e12, 362e12),
    "l40": Device(0.864e12, 181e12),
    "l20": Device(0.864e12, 119e12),
    "l4": Device(0.3e12, 121e12),
    "t4": Device(0.32e12, 65e12),
    "v100": Device(0.9e12, 125e12, V100),
    "rtxpro6000": Device(1.79e12, 503e12, RTX_PRO_6000),
    "rtxpro6000-server": Device(1.6e12, 503e12, ("rtxpro-6000-blackwell-server-edition",)),
    "rtx6000-ada": Device(0.96e12, 364e12, ("rtx6000-ada-generation",)),
    "a6000": Device(0.768e12, 155e12, ("rtxa6000",)),
    "rtx5090": Device(1.79e12, 209e12),
    "rtx4090": Device(1.0e12, 165e12),
    "rtx3090": Device(0.936e12, 71e12),
    "mi300x": Device(5.3e12, 1307e12, ("mi300x-oam", "mi300x-vf", "mi300x-hf")),
    "mi325x": Device(6.0e12, 1307e12, ("mi325-oam", "mi325x-vf")),
}


LAUNCHES = 35e-6
"""Seconds that a layer or a read of the head takes in a CUDA graph, however few its weights are."""
GPU_ENGINE_SECONDS = 0.3e-3
"""Of a step, around the model. With both, SmolLM2-135M takes 1.4 ms at batch 1, as measured on an
H200, where the bytes of its 30 layers would take 0.06."""


BYTES = Device(bandwidth=1.0, peak=math.inf)
"""Of no device: a part's seconds are the bytes that it reads."""
CPU = "cpu"
"""The name of two cores, as far as they are known without timing them."""
CPU_BANDWIDTH = 20e9
"""Bytes of weights a second, of a few cores."""
CPU_ROW_SHARE = 0.06
"""What a further row costs, as a share of the first. In bfloat16 on two cores, steps of one and of
eight rows took 21 and 36 ms with 300M parameters; of one, eight and 32 rows 33, 38 and 84 ms with
135M."""
AMX_ROW_SHARE = 0.02
"""The same in bfloat16 where the CPU has matrix units: there, 25, 28 and 41 ms with 135M."""
CPU_LAYER_SECONDS, CPU_CHECK_SECONDS = 0.1e-3, 0.8e-3
"""A layer's without reading weights, and what the host does about a check or a draft. On two cores,
a model of 24 layers and 36 MB takes 5.5 ms, and a draft of its first six 1.9; one of 30 layers and
270 MB 20 ms and 4.0."""
ENGINE_SECONDS = 1.4e-3, 0.06e-3
"""For one row and for each further one: what vLLM 0.32 does around the model in a step on a CPU."""


def device_named(name: str) -> Device | None:
    """Looks up a device, None for `CPU`; raises `ExitServeError` if the table does not have it."""
    known = (*DEVICES, CPU)
    if name not in known:
        raise ExitServeError(
            f"--device {name!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}; "
            f"without --device this machine is measured."
        )
    return DEVICES.get(name)


def device_called(name: str) -> str | None:
    """The table's name of a device that its driver calls `name`; None if it is not there."""
    words = re.sub("nvidia|amd|geforce|tesla|instinct", "", name.lower().replace("_", " "))
    called = "-".join(words.replace("rtx ", "rtx").split())
    return next((key for key, one in DEVICES.items() if called in (key, *one.called)), None)


def cpu_costs(shape: DecoderShape, largest: int, row_share: float = CPU_ROW_SHARE) -> StepCosts:
    """What the parts of a step cost on a CPU, for up to `largest` rows."""

    def line(first: float, each: float) -> Curve:
        return Curve(((1, first), (largest, first + each * (largest - 1))))

    def product(weights: int, least: float = 0.0) -> Curve:
        first = weights / CPU_BANDWIDTH
        return line(least + first, row_share * first)

    head = product(shape.head_bytes)
    return StepCosts(
        num_layers=shape.num_layers,
        matrices=product(shape.layer_bytes, CPU_LAYER_SECONDS),
        attention=line(0.0, 0.0),
        fill=product(shape.kv_projection_bytes),
        check=product(shape.check_bytes, CPU_CHECK_SECONDS),
        head=head,
        rest=line(*ENGINE_SECONDS),
        exits=line(0.0, 0.0),
    )


def row_share_here() -> float:
    """Of this CPU."""
    import torch

    return AMX_ROW_SHARE if torch.cpu.get_capabilities().get("amx_bf16") else CPU_ROW_SHARE


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
    return StepCosts(
        num_layers=shape.num_layers,
        matrices=product(shape.layer_bytes),
        attention=curve(lambda rows: rows * max(cache / device.bandwidth, flops / device.peak)),
        fill=product(shape.kv_projection_bytes),
        check=product(shape.check_bytes),
        head=product(shape.head_bytes),
        rest=curve(lambda rows: 0.0),
        exits=curve(lambda rows: 0.0),
    )


def with_launches(costs: StepCosts) -> StepCosts:
    """The same, where no part takes less than its launches; copies of several layers have one."""

    def at_least(curve: Curve, least: float) -> Curve:
        return Curve(tuple((rows, max(seconds, least)) for rows, seconds in curve.points))

    return replace(
        costs,
        matrices=at_least(costs.matrices, LAUNCHES),
        check=at_least(costs.check, LAUNCHES),
        head=at_least(costs.head, LAUNCHES),
        rest=at_least(costs.rest, GPU_ENGINE_SECONDS),
    )
