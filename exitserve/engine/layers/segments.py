"""The layers between two exits, compiled as one unit.

Data-dependent branches lie between segments, never inside one, so vLLM's own compilation (and,
on a GPU, its CUDA graphs) sees ordinary straight code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.engine.compat.compiled import compiled_module

Stream = tuple[Tensor, Tensor | None]
"""The residual stream [T, D]: alone, or as a pair whose sum it is (the next norm adds them)."""

Ended = tuple[Tensor, Tensor | None, Tensor | None]
"""Behind some layers: normed states [T, D], and the stream, None behind the last layers."""

RunLayer = Callable[[Any, Tensor, Stream], Stream]
"""Runs one decoder layer: (layer, positions [T], stream) to stream."""


def total_of(stream: Stream) -> Tensor:
    """The residual stream [T, D] itself."""
    hidden, residual = stream
    return hidden if residual is None else hidden + residual


def ended(
    final_norm: Callable[[Tensor, Tensor | None], Tensor], *, is_last: bool
) -> Callable[[Stream], Ended]:
    """The model's final norm, behind the layers before an exit or behind the last ones.

    Compiled with them it is fused into what they end with; by itself vLLM runs it as half a dozen
    operations. Behind the last layers it is called as vLLM does, to the bit; vLLM's form
    for pairs may write into what it is given, so it gets a sum of its own where the stream goes on.
    """

    def end_with(stream: Stream) -> Ended:
        if is_last:
            return final_norm(*stream), None, None
        return final_norm(total_of(stream), None), *stream

    return end_with


def restored(stream: Stream, frozen: Tensor, state: Tensor) -> Stream:
    """Sets frozen tokens to their state, and leaves the others bit for bit.

    Args:
        stream: [T, D]; a pair becomes (0, state).
        frozen: [T, 1] bool.
        state: [T, D].
    """
    hidden, residual = stream
    if residual is None:
        return torch.where(frozen, state, hidden), None
    return hidden.masked_fill(frozen, 0.0), torch.where(frozen, state, residual)


class Segment(nn.Module):
    """Layers `start + 1 .. end` of a decoder. `compiled_segment` makes one."""

    def __init__(
        self,
        *,
        vllm_config: Any,
        prefix: str = "",
        layers: list[nn.Module],
        start: int,
        end: int,
        run_layer: RunLayer,
        end_with: Callable[[Stream], Ended],
    ) -> None:
        super().__init__()
        # A tuple, not a ModuleList: the layers stay registered once, in vLLM's own model.
        self.layers = tuple(layers[start:end])
        self.end = end
        self.size = end - start
        self.run_layer = run_layer
        self.end_with = end_with

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Ended:
        """Runs the layers: positions [T], stream [T, D]."""
        for layer in self.layers:
            hidden, residual = self.run_layer(layer, positions, (hidden, residual))
        return self.end_with((hidden, residual))

    def masked(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        frozen: Tensor,
        state: Tensor,
    ) -> Ended:
        """As `forward`; after each layer frozen tokens get their state back (`restored`).

        Args:
            positions: [T].
            hidden: [T, D].
            residual: [T, D] or None.
            frozen: [T, 1] bool.
            state: [T, D] of the frozen ones.
        """
        for layer in self.layers:
            stream = self.run_layer(layer, positions, (hidden, residual))
            hidden, residual = restored(stream, frozen, state)
        return self.end_with((hidden, residual))


def compiled_segment(
    vllm_config: Any,
    layers: list[nn.Module],
    start: int,
    end: int,
    run_layer: RunLayer,
    *,
    final_norm: Callable[[Tensor, Tensor | None], Tensor],
    masked: bool = False,
) -> Segment:
    """A segment that is compiled as one unit where vLLM compiles.

    With `masked` a call of it is `Segment.masked`.
    """
    name = f"segment_{start}_{end}" + ("_masked" if masked else "")
    end_with = ended(final_norm, is_last=end == len(layers))

    arguments = ["positions", "hidden", "residual", *(["frozen", "state"] if masked else [])]
    segment: Segment = compiled_module(
        vllm_config,
        name,
        Segment,
        Segment.masked if masked else Segment.forward,
        arguments,
        layers=layers,
        start=start,
        end=end,
        run_layer=run_layer,
        end_with=end_with,
    )
    return segment
