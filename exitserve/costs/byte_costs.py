"""The bytes that a decode step must read, and the limit they set on wall speedup.

Decoding at small batches is bound by memory traffic, so the least time of a step is the bytes it
must read, over the bandwidth. In the ratio of two steps the bandwidth cancels:

    bytes(step) = sum over layers i of  W_layer                     if any row needs layer i
                                        W_kv                        otherwise (propagation)
                + sum over rows b, layers i <= depth_b of  context_b * kv_token
                + checks * W_check + W_head         if any row runs all layers
    limit = sum of bytes(full-depth steps) / sum of bytes(observed steps)

A check reads the exit rows of the head (`exitserve.checkpoint.exit_rows`), or all of it. One that
passes gives the tokens that exit there, so a step in which every row exits does not read the head
again at the end. A layer's weights are read once for
the whole batch. Left out, because they are small and the same on both sides: embedding rows,
norms, activations, and writing the new token's keys and values.

Pure Python. Shapes: B rows, L layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from exitserve.errors import ExitServeError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST_EXIT_ROWS = 4096
"""With so many, nearly all tokens that pass a check are those of the whole head: 0.989 and more of
them on a model of 49,152 tokens, 0.998 with twice as many."""
CHECK_IN_LAYERS = 0.25
"""What a check may cost, in layers, if that takes no fewer than `LEAST_EXIT_ROWS`."""
WORTH_CUTTING = 2
"""A vocabulary of fewer times as many tokens is read as it is."""

_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The sizes of a Llama-type decoder that decide how much a step reads."""

    num_layers: int
    """L."""
    hidden_size: int
    """D."""
    intermediate_size: int
    """F, the width of the feed-forward block; of all active experts together in a mixture."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """V."""
    dtype_bytes: int
    """Bytes of one weight, and of one number in the key-value cache."""
    feed_forward_matrices: int = 3
    """D x F matrices: three in a gated block, two in a plain one."""
    exit_rows: int | None = None
    """Rows of the head that a check reads; None: all."""

    @property
    def kv_projection_bytes(self) -> int:
        """K and V weights of one layer: 2 * D * kv_heads * head_dim numbers."""
        return 2 * self.hidden_size * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def layer_bytes(self) -> int:
        """All matrices of one layer: Q and output, K and V, and the feed-forward block."""
        query_and_output = 2 * self.hidden_size * self.num_heads * self.head_dim
        feed_forward = self.feed_forward_matrices * self.hidden_size * self.intermediate_size
        return (query_and_output + feed_forward) * self.dtype_bytes + self.kv_projection_bytes

    @property
    def head_bytes(self) -> int:
        """The LM head, D * V numbers, tied or not."""
        return self.hidden_size * self.vocab_size * self.dtype_bytes

    @property
    def check_bytes(self) -> int:
        """The rows of the head that an exit check reads, and a draft."""
        rows = self.vocab_size if self.exit_rows is None else self.exit_rows
        return self.hidden_size * rows * self.dtype_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One decode step as observed: B rows, each at its own depth."""

    depths: tuple[int, ...]
    """[B] layers run by each row; L for full depth."""
    contexts: tuple[int, ...]
    """[B] tokens of each row in the cache that its attention reads."""
    checks: int = 0
    """Exit checks made; each reads its rows of the head once, for all tokens together."""


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """What the parts of a decode step cost one token, all in the same unit."""

    num_layers: int
    """L."""
    layer: float
    """One layer, its cache included."""
    fill: float
    """Keys and values of one layer that is not run."""
    check: float
    """One exit check, which also gives the token of one that exits by it."""
    head: float
    """The head at full depth."""
    rest: float = 0.0
    """Cost of every token at any depth: embedding, sampling, the engine's own work."""

    def of(self, depth: float, checks: float, stays: float) -> float:
        """The mean cost of tokens, as a share of full depth's.

        Args:
            depth: mean number of layers run.
            checks: mean number of checks.
            stays: share of tokens that ran all layers, and then the head.
        """
        full = self.rest + self.num_layers * self.layer + self.head
        fill = self.fill * (self.num_layers - depth)
        heads = checks * self.check + stays * self.head
        return (self.rest + depth * self.layer + fill + heads) / full


def serving_dtype(config: Mapping[str, Any], asked: str | None = None) -> str:
    """The type that weights are served in: as asked, else as vLLM chooses by default.

    vLLM serves a checkpoint in its own type, but one in float32 in bfloat16.

    Args:
        config: a parsed `config.json`.
        asked: of `--dtype`; None or "auto" for the default.

    Raises:
        ExitServeError: the type asked for is unknown.
    """
    if asked is not None and asked != "auto":
        if asked not in DTYPE_BYTES:
            allowed = ", ".join(("auto", *DTYPE_BYTES))
            raise ExitServeError(f"--dtype {asked!r} is unknown; allowed: {allowed}.")
        return asked
    own = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    return "float16" if own == "float16" else "bfloat16"


def shape_of(config: Mapping[str, Any], dtype: str) -> DecoderShape:
    """Reads the sizes from a `config.json` of the Llama type, a mixture of experts, or GPT-2.

    Args:
        config: the parsed file; `num_key_value_heads` and `head_dim` may be absent, as
            transformers allows.
        dtype: the type that weights and cache are served in, one of `DTYPE_BYTES`.

    Returns:
        The shape, with the exit rows that `exitserve calibrate` makes for it.

    Raises:
        ExitServeError: a size is missing or not a positive whole number, or the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ExitServeError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPE_BYTES)}.")
    plain = "n_embd" in config
    if plain:
        config = {name: config.get(old) for name, old in _GPT2_NAMES.items()}
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    width = _size(config, "intermediate_size", 4 * hidden if plain else None)
    if config.get("num_experts_per_tok"):
        width = _size(config, "moe_intermediate_size", width) * _size(config, "num_experts_per_tok")
    shape = DecoderShape(
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        vocab_size=_size(config, "vocab_size"),
        dtype_bytes=DTYPE_BYTES[dtype],
        feed_forward_matrices=2 if plain else 3,
    )
    return replace(shape, exit_rows=exit_rows_for(shape))


def exit_rows_for(shape: DecoderShape) -> int | None:
    """How many exit rows a model should have; None where its vocabulary is hardly larger.

    The most with which a check costs `CHECK_IN_LAYERS`, a power of two and `LEAST_EXIT_ROWS` at
    least: more rows say more, and beside a layer they should not count.
    """
    rows, row_bytes = LEAST_EXIT_ROWS, shape.hidden_size * shape.dtype_bytes
    while 2 * rows * row_bytes <= CHECK_IN_LAYERS * shape.layer_bytes:
        rows *= 2
    return rows if shape.vocab_size >= WORTH_CUTTING * rows else None


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ExitServeError(
            f"config.json has {name} = {value!r}; the cost model needs a whole number above 0, "
            f"as Llama-type checkpoints have it."
        )
    return value


def step_bytes(shape: DecoderShape, step: DecodeStep) -> int:
    """Least bytes that one decode step reads; the formula is in the module's header.

    Raises:
        ValueError: depths and contexts differ in length, or a depth lies outside 1..L.
    """
    if len(step.depths) != len(step.contexts):
        raise ValueError(f"{len(step.depths)} depths but {len(step.contexts)} contexts.")
    if not all(1 <= depth <= shape.num_layers for depth in step.depths):
        raise ValueError(f"depths {step.depths} must lie in 1..{shape.num_layers}.")
    deepest = max(step.depths, default=0)
    weights = deepest * shape.layer_bytes
    weights += (shape.num_layers - deepest) * shape.kv_projection_bytes
    heads = step.checks * shape.check_bytes
    heads += shape.head_bytes if deepest == shape.num_layers else 0
    cache = sum(d * c for d, c in zip(step.depths, step.contexts, strict=True))
    return weights + heads + cache * shape.kv_token_bytes


def full_depth(shape: DecoderShape, step: DecodeStep) -> DecodeStep:
    """The same step in the plain model: every row runs L layers, nothing is checked."""
    return DecodeStep(
        depths=(shape.num_layers,) * len(step.depths), contexts=step.contexts, checks=0
    )


def limit_speedup(shape: DecoderShape, steps: Sequence[DecodeStep], checks: int = 0) -> float:
    """The largest possible wall speedup: least bytes at full depth over those of `steps`.

    Args:
        shape: the decoder.
        steps: as observed.
        checks: exit checks of all steps together, where `DecodeStep.checks` is not given.

    Returns:
        A ratio (no unit); 1.0 for no steps. Below 1.0 where checks cost more than they save.
    """
    if not steps:
        return 1.0
    full = sum(step_bytes(shape, full_depth(shape, step)) for step in steps)
    observed = sum(step_bytes(shape, step) for step in steps)
    return full / (observed + checks * shape.check_bytes)


def limit_of_reads(
    shape: DecoderShape, steps: Sequence[DecodeStep], *, layers: float, checks: float, heads: float
) -> float:
    """`limit_speedup` from counted reads, for engine steps that give several tokens.

    Args:
        shape: the decoder.
        steps: those that full depth would need, one for each token of a request.
        layers: reads of a layer's weights for such a step, each for all tokens that ran it
            together; on average.
        checks: reads of the exit rows for it, by checks and drafts.
        heads: reads of the whole head for it.
    """
    full = fmean(step_bytes(shape, full_depth(shape, step)) for step in steps)
    # At least this: attention reads a row's keys and values once for all its tokens of a pass.
    contexts = fmean(sum(step.contexts) for step in steps)
    cache = contexts * shape.kv_token_bytes * layers
    read = checks * shape.check_bytes + heads * shape.head_bytes
    return full / (layers * shape.layer_bytes + read + cache)
