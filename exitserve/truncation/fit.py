"""How much memory each depth of a decoder needs, and the most layers that fit a budget.

    need(N) = weights outside the layers + sum of the first N layers' weights
            + requests * context * N * (keys and values of one token in one layer)

A depth fits if its need is at most `USABLE` of the budget: activations, compiled code and CUDA
graphs take the rest. This is what plain vLLM needs. Serving with exits takes a second copy of the
K/V projections above the first exit layer. Layers with windowed attention are counted at the full
context, so models with such layers need less than this says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from exitserve.checkpoint.block import num_layers_of
from exitserve.checkpoint.first_layers import layer_of
from exitserve.checkpoint.weights import StoredTensor
from exitserve.costs.byte_costs import DTYPE_BYTES, shape_of
from exitserve.errors import ExitServeError

USABLE = 0.9
"""Share of a budget for weights and cache; vLLM takes about this share of a GPU by default."""
_FLOATS = ("F32", "F16", "BF16")
"""Stored types that vLLM converts to the type it serves; others (quantised) stay as they are."""
_UNUSED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Suffixes of tensors in old checkpoints that no model loads."""
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text", "gpt2")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the memory must hold besides the weights."""

    requests: int
    """How many at the same time."""
    context: int
    """Tokens of each, prompt and answer together."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a decoder as vLLM serves it."""

    outside: int
    """Embeddings, final norm and head."""
    layers: tuple[int, ...]
    """[L] of each layer."""
    kv_token: int
    """Keys and values of one token in one layer."""

    def weights(self, num_layers: int) -> int:
        """Bytes of the weights of the first layers, with embeddings, norm and head."""
        return self.outside + sum(self.layers[:num_layers])

    def kv_tokens(self, num_layers: int, budget: int) -> int:
        """Tokens of key-value cache that fit beside the weights; 0 if the weights do not fit."""
        room = int(budget * USABLE) - self.weights(num_layers)
        return max(0, room // (num_layers * self.kv_token))

    def budget(self, num_layers: int, load: Load) -> int:
        """The least budget that holds a depth and its load."""
        cache = load.requests * load.context * num_layers * self.kv_token
        return -int(-(self.weights(num_layers) + cache) // USABLE)


def parse_size(text: str) -> int:
    """Bytes of a size such as `8GiB`, `500MB`.

    Raises:
        ExitServeError: the text is not a size.
    """
    try:
        size = 0 if text.isdigit() else TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = 0
    if not size:
        raise ExitServeError(
            f"size {text!r} is unknown; write a number above 0 and a unit, such as 8GiB or 500MB."
        )
    return int(size)


def sizes_of(config: Mapping[str, Any], tensors: Iterable[StoredTensor], dtype: str) -> Sizes:
    """Sums up the sizes of a checkpoint's tensors.

    Raises:
        ExitServeError: the config lacks a size, or the dtype is unknown.
    """
    kv_token = shape_of(config, dtype).kv_token_bytes
    tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)
    outside, layers = 0, [0] * num_layers_of(config)
    for tensor in tensors:
        if tensor.name.endswith(_UNUSED) or (tied and tensor.name == "lm_head.weight"):
            continue
        size = tensor.num_bytes
        if tensor.dtype in _FLOATS:
            size = tensor.num_elements * DTYPE_BYTES[dtype]
        layer = layer_of(tensor.name)
        if layer is None:
            outside += size
        elif layer < len(layers):
            layers[layer] += size
    return Sizes(outside=outside, layers=tuple(layers), kv_token=kv_token)


def deepest_fit(sizes: Sizes, depths: Sequence[int], budget: int, load: Load) -> int:
    """The largest of `depths` that fits a budget together with its load.

    Raises:
        ExitServeError: none fits; the message says what the smallest needs.
    """
    fitting = [depth for depth in depths if sizes.budget(depth, load) <= budget]
    if fitting:
        return max(fitting)
    least = min(depths)
    raise ExitServeError(
        f"no depth fits {format_bytes(budget)}: the smallest, {least} of {len(sizes.layers)} "
        f"layers, needs {format_bytes(sizes.budget(least, load))} for its weights and "
        f"{load.requests} x {load.context} tokens of context ({1 - USABLE:.0%} left for the "
        f"rest); give more, or a lower --context or --requests."
    )


def format_bytes(count: int) -> str:
    """Bytes for a reader: `3.4 GiB`."""
    return ByteSize(count).human_readable(separator=" ")


def depth_table(
    sizes: Sizes, depths: Sequence[int], budget: int | None, context: int
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table that compares depths.

    Args:
        sizes: of the full model.
        depths: one row for each, with its gain over full depth.
        budget: of memory, for columns of what fits beside the weights; None leaves them out.
        context: tokens of a request.
    """
    full = len(sizes.layers)
    headers = ["layers", "weights", "cache a token"]
    if budget is not None:
        headers += ["tokens in the cache", f"requests of {context} tokens"]
    rows = []
    for depth in depths:
        row = [
            f"{depth} of {full}",
            format_bytes(sizes.weights(depth)),
            format_bytes(depth * sizes.kv_token),
        ]
        if budget is not None:
            tokens, whole = sizes.kv_tokens(depth, budget), sizes.kv_tokens(full, budget)
            row.append("does not fit" if not tokens else f"{tokens:,}")
            gain = tokens // context - whole // context
            more = f" (+{gain})" if depth < full else ""
            row.append(f"{tokens // context}{more}")
        rows.append(row)
    return headers, rows
