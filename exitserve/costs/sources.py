"""Costs of a step's parts, from timing this machine or from a table. Light to import."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exitserve.checkpoint.block import context_length_of
from exitserve.costs.byte_costs import DecoderShape, serving_dtype, shape_of
from exitserve.costs.curves import StepCosts
from exitserve.costs.devices import (
    CPU_BANDWIDTH,
    FIGURES,
    Device,
    cpu_costs,
    device_named,
    roofline,
    with_launches,
)
from exitserve.errors import ExitServeError

MOST_TOKENS = 9
"""Of a request in a step: eight drafts and one more."""


@dataclass(frozen=True, kw_only=True)
class CostSource:
    """Costs of a step's parts for one model, and where they are from."""

    costs: StepCosts
    shape: DecoderShape
    dtype: str
    measured: bool
    details: dict[str, Any]
    """For the report: `bandwidth` (bytes a second) and more."""
    notes: tuple[str, ...]


def step_costs(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    batch_sizes: Sequence[int] = (1,),
    context: int = 0,
    device: str | Device | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> CostSource:
    """What the parts of a decode step cost.

    Args:
        config: a parsed `config.json`.
        dtype: of weights and cache; None for what vLLM would choose.
        batch_sizes: numbers of rows that decode together.
        context: tokens that each row's attention reads.
        device: a name in `exitserve.costs.devices.DEVICES`, `CPU`, or figures of another; None to
            measure this machine.
        progress: called with the share of the timing that is done, 0..1.

    Raises:
        ExitServeError: a value is wrong, the shape unknown, or too large to be timed here.
    """
    figures = device_named(device) if isinstance(device, str) else device
    largest = max(batch_sizes) * MOST_TOKENS
    served = serving_dtype(config, dtype)
    shape = shape_of(config, served)
    _check(config, shape, served, batch_sizes, context, device)
    if device is None:
        from exitserve.costs.timing import UNSTEADY, time_step  # loads torch

        costs, details = time_step(shape, served, rows_to_time(batch_sizes), context, progress)
        notes, unsteady = [], details["unsteadiness"]
        if unsteady > UNSTEADY:
            notes.append(
                f"the machine was busy or unsteady while this was measured (median over least time "
                f"of a part up to {unsteady:.2f}): run again when it is quiet."
            )
    elif figures is None:
        costs = cpu_costs(shape, largest)
        details = {"device": device, "bandwidth": CPU_BANDWIDTH, "threads": 2}
        notes = ["cpu: two cores that read 20 GB/s of weights. Other machines differ."]
    else:
        costs = with_launches(roofline(shape, figures, context, largest))
        details = {"bandwidth": figures.bandwidth, "peak_flops": figures.peak}
        details |= {"device": str(device)}
        notes = [f"{device}: {FIGURES}. Times are lower bounds: measure wall speedup there."]
    return CostSource(
        costs=costs,
        shape=shape,
        dtype=served,
        measured=device is None,
        details=details,
        notes=(*notes, *_notes_on(config, served, context)),
    )


def _check(
    config: Mapping[str, Any],
    shape: DecoderShape,
    dtype: str,
    batch_sizes: Sequence[int],
    context: int,
    device: str | Device | None,
) -> None:
    if shape.num_layers < 2:
        raise ExitServeError("the model has one layer, so there is no layer to exit before.")
    if device is not None and dtype == "float32":
        raise ExitServeError("--device knows 16-bit figures only; give --dtype bfloat16.")
    longest = context_length_of(config)
    if context < 0 or (longest is not None and context > longest):
        raise ExitServeError(f"--context {context} is outside the model's 0..{longest} tokens.")
    if config.get("num_experts_per_tok") and max(batch_sizes) > 1:
        raise ExitServeError(
            "a mixture of experts is planned at batch 1 only, because which experts a larger "
            "batch reads depends on its tokens; give --batch-sizes 1."
        )


def _notes_on(config: Mapping[str, Any], dtype: str, context: int) -> list[str]:
    notes = []
    if config.get("quantization_config"):
        notes.append(
            f"the checkpoint is quantised, and planned as if it were {dtype}: its layers are "
            f"cheaper, so a check costs more layers than this says."
        )
    window = config.get("sliding_window")
    if window and context > window and config.get("use_sliding_window") is not False:
        notes.append("layers with a sliding window are planned as if they read the whole context.")
    return notes


def rows_to_time(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Numbers of rows at which to time a step's parts: powers of two, and the sizes themselves."""
    largest = max(batch_sizes)
    powers = {2**power for power in range(largest.bit_length()) if 2**power <= largest}
    return tuple(sorted(powers | set(batch_sizes)))
