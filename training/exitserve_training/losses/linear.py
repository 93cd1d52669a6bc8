"""Cross-entropy through a linear head, its gradients computed in the forward pass.

`losses.chunked` keeps no logits and computes them twice: 4 products of size M * D * V per chunk
(forward, forward again, two in backward). The gradient of a sum of cross-entropies needs nothing
that is unknown in forward but one factor, the upstream gradient u of the sum. So here each chunk
of tokens is finished while its logits exist, with 3 products. With x = norm(h) [M, D], head
weight W [V, D], bias b, soft cap c and the weight s_i of token i's loss:

    z = x W^T + b,  a = c tanh(z / c)  (a = z without a cap),  p = softmax(a)
    loss_i = -log p_i[y_i],  total = sum over i of s_i loss_i
    G_i = s_i (p_i - onehot(y_i)) * (1 - (a_i / c)^2)  (the last factor 1 without a cap)
    dx = G W,  dW = G^T x,  db = G^T 1,  dh = (norm's own backward)(dx)

Backward multiplies all of it by u. G is written over z, so that at any moment one chunk's
[chunk, V] numbers exist, and the one [V, D] sum dW. s is divided by its largest entry first and
that entry multiplied back in backward: the entries of G then keep within float16, however small
the mean's 1 / M is, and a loss scale in u arrives before anything is rounded to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from exitserve.errors import ExitServeError

CHUNK_TOKENS = 512
"""Tokens classified at once. Measured on two CPU cores, 1024 tokens, D = 1024, V = 32000, float32,
forward and backward: 4.0 s in chunks of 128, 3.2 s of 256, 2.7 s of 512, 2.6 s in one of 1024,
whose logits are twice as many. Checkpointed chunks of 512 take 4.1 s, all logits kept 2.7 s."""

_SLICE_ELEMENTS = 2**23
"""Logits of a chunk turned into float32 at once, where the products have fewer digits (32 MB).
On a CPU any size from 2^18 to 2^26 takes the same time; a GPU wants few, large kernels."""

_BLOCK_ROWS = 8192
"""Rows of the head's gradient [V, D] that a chunk's product in fewer digits holds at once."""


@dataclass(frozen=True)
class OutputHead:
    """The classifier taken apart: un-normed hidden states [..., D] to logits [..., V].

    The modules' parameters are looked up at each call: under FSDP they are whole only inside the
    model's forward.
    """

    norm: nn.Module
    linear: nn.Module
    soft_cap: float | None = None
    """Bound of the logits, where the architecture has one (Gemma 2)."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Final norm, then linear head, then soft cap: the same as `DecoderParts.classify`."""
        logits: Tensor = self.linear(self.norm(hidden))
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    @property
    def is_plain(self) -> bool:
        """Whether the linear part is x W^T + b and no more; wrapped in a LoRA it is not."""
        return type(self.linear) is nn.Linear


@dataclass(frozen=True)
class TokenGroup:
    """M tokens to be predicted, out of N whose hidden states are at hand.

    The states that count are taken chunk by chunk, so that no copy [M, D] of them is made.
    """

    hidden: Tensor
    """Un-normed [N, D]."""
    labels: Tensor
    """[M], none of them ignored."""
    scale: Tensor
    """Float [M]: the weight of each token's loss. It gets no gradient."""
    rows: Tensor | None = None
    """int64 [M], each at most once: which of the N count. None: all of them, and M = N."""


def linear_cross_entropy(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    scale: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of M tokens' cross-entropies, and each of them (nats).

    The sum is a differentiable scalar in float32 (float64 for a float64 head). The losses [M] of
    the tokens are unweighted and detached. Products are computed in autocast's dtype or else the
    head's, softmax and sums in float32. Gradients cannot be differentiated again. With no token
    the sum is 0 with zero gradients.

    Args:
        hidden: un-normed hidden states [M, D].
        head: a plain head; its norm must treat each token by itself.
        labels: targets [M], none of them ignored.
        scale: float [M], the weight of each token's loss; it gets no gradient.
        chunk_tokens: tokens whose logits may exist at once, at least 1.

    Raises:
        ExitServeError: shapes disagree, `chunk_tokens` is not positive, or the head's linear
            part is more than an `nn.Linear`.
    """
    total, (losses,) = grouped_cross_entropy(
        [TokenGroup(hidden, labels, scale)], head, chunk_tokens=chunk_tokens
    )
    return total, losses


def grouped_cross_entropy(
    groups: Sequence[TokenGroup], head: OutputHead, *, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, list[Tensor]]:
    """`linear_cross_entropy` of several groups of tokens: one sum, the losses group by group.

    However many groups, there is one [V, D] sum of the head's gradients.

    Raises:
        ExitServeError: as `linear_cross_entropy`, or there is no group.
    """
    if not groups:
        raise ExitServeError("groups is empty; give the tokens of one layer at least.")
    if chunk_tokens < 1:
        raise ExitServeError(f"chunk_tokens {chunk_tokens} must be at least 1, such as 512.")
    if not head.is_plain:
        raise ExitServeError(
            f"the head is a {type(head.linear).__name__}, whose gradients only autograd knows; "
            f"expected nn.Linear itself. Use chunked_cross_entropy for this head."
        )
    for tokens in groups:
        _check_shapes(tokens)
    known = _trainable(head.norm)
    job = _Job(head, groups, chunk_tokens, tuple(known), torch.is_grad_enabled())
    linear = head.linear
    states = [tokens.hidden for tokens in groups]
    total, *losses = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        job, linear.weight, linear.bias, *known.values(), *states
    )
    return total, losses


def _check_shapes(tokens: TokenGroup) -> None:
    if tokens.hidden.ndim != 2:
        raise ExitServeError(
            f"hidden states have shape {tuple(tokens.hidden.shape)}; expected [N, D], such as "
            f"hidden.flatten(0, 1)."
        )
    count = len(tokens.hidden if tokens.rows is None else tokens.rows)
    if tokens.labels.shape != (count,) or tokens.scale.shape != (count,):
        raise ExitServeError(
            f"labels have shape {tuple(tokens.labels.shape)} and scale "
            f"{tuple(tokens.scale.shape)}, but {count} tokens count; expected [{count}] for both."
        )


def _trainable(norm: nn.Module) -> dict[str, Tensor]:
    """The norm's tensors that need a gradient. FSDP makes of a parameter a plain attribute."""
    found: dict[str, Tensor] = {}
    for path, module in norm.named_modules():
        members = (*module.named_parameters(recurse=False), *vars(module).items())
        for name, value in members:
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            if all(value is not other for other in found.values()):
                found[f"{path}.{name}" if path else name] = value
    return found


@dataclass(frozen=True)
class _Job:
    """What the autograd function needs besides the tensors it differentiates by."""

    head: OutputHead
    groups: Sequence[TokenGroup]
    chunk_tokens: int
    names: tuple[str, ...]
    """The norm's trainable tensors."""
    differentiate: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """The header's formulas, from weight, bias, the norm's tensors and the groups' states."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the weighted sum and each group's losses; keeps the gradients for backward."""
        first_states = 2 + len(job.names)
        wanted = [job.differentiate and needed for needed in ctx.needs_input_grad[1:]]
        gradients = [
            # Sums over tokens need float32; the gradient of a state has one summand.
            _zeros(value, _sum_dtype(value) if place < first_states else value.dtype)
            if value is not None and wanted[place]
            else None
            for place, value in enumerate(inputs)
        ]
        head = _HeadPass(job, inputs[:first_states], gradients[:first_states], any(wanted))
        largest = _largest([tokens.scale for tokens in job.groups]).to(head.sum_dtype)
        total = torch.zeros_like(largest)
        losses = []
        for tokens, states_grad in zip(job.groups, gradients[first_states:], strict=True):
            scale = tokens.scale.to(head.sum_dtype)
            found = torch.zeros_like(scale)
            for part in _pieces(len(scale), job.chunk_tokens):
                rows = part if tokens.rows is None else tokens.rows[part]
                found[part], gradient = head.run(
                    tokens.hidden[rows],
                    tokens.labels[part],
                    scale[part] / largest,
                    wants_states=states_grad is not None,
                )
                if states_grad is not None and gradient is not None:
                    states_grad[rows] = gradient
            total += (scale * found).sum()
            losses.append(found)
        ctx.mark_non_differentiable(*losses)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.dtypes = [None if value is None else value.dtype for value in inputs]
        ctx.save_for_backward(largest)
        return total, *losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiplies every gradient by the upstream scalar."""
        # Raises torch's own error if the graph was used before and not retained.
        (largest,) = ctx.saved_tensors
        gradients: list[Tensor | None] = ctx.gradients
        if upstream is None:
            return (None, *[None for _ in gradients])
        factor = upstream * largest
        if _graph_is_retained():
            scaled = [None if value is None else value * factor for value in gradients]
        else:
            # Memory peaks here: scaled in place and given away, [V, D] exists once.
            ctx.gradients = None
            scaled = [None if value is None else value.mul_(factor) for value in gradients]
        pairs = zip(scaled, ctx.dtypes, strict=True)
        return (None, *[None if value is None else value.to(dtype) for value, dtype in pairs])


class _HeadPass:
    """Norm, head and softmax, one chunk of tokens after another, forward and backward at once."""

    def __init__(
        self,
        job: _Job,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        differentiate: bool,
    ) -> None:
        """Takes weight, bias and the norm's tensors, and the sums of their gradients or None."""
        weight, bias, *known = inputs
        assert weight is not None
        self.norm, self.soft_cap = job.head.norm, job.head.soft_cap
        self.differentiate = differentiate
        self.device, self.sum_dtype = weight.device, _sum_dtype(weight)
        dtype = _product_dtype(weight)
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.weight_grad, self.bias_grad, *known_grads = gradients
        # The norm runs on leaves of its own: hooks of its parameters shall see the whole gradient.
        self.known: dict[str, Tensor] = {}
        self.known_grads: list[Tensor] = []
        for name, value, gradient in zip(job.names, known, known_grads, strict=True):
            if value is not None and gradient is not None:
                self.known[name] = value.detach().requires_grad_()
                self.known_grads.append(gradient)
        most = max(len(tokens.labels) for tokens in job.groups)
        # Buffers for all chunks: memory fresh from the system costs more than a softmax.
        self.logits = self.weight.new_empty(min(job.chunk_tokens, most), len(weight))
        self.slice_rows = max(_SLICE_ELEMENTS // len(weight), 1)
        rows = 0 if dtype == self.sum_dtype else min(self.slice_rows, len(self.logits))
        self.scratch = self.weight.new_empty(rows, len(weight), dtype=self.sum_dtype)
        # On a CPU torch makes a copy, in memory fresh from the system, of what has another dtype.
        self.copies = dtype != self.sum_dtype and self.device.type == "cpu"

    def run(
        self, states: Tensor, labels: Tensor, scale: Tensor, *, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The losses [n] of states [n, D]; adds to the sums; the states' gradient if wanted."""
        leaf = states.detach().requires_grad_(wants_states)
        by = [*([leaf] if wants_states else []), *self.known.values()]
        with torch.set_grad_enabled(bool(by)):
            normed: Tensor = functional_call(self.norm, self.known, (leaf,))
        # The dtypes are chosen by now. Autocast would keep a copy of the weight once more.
        with torch.autocast(self.device.type, enabled=False):
            features = normed.detach().to(self.weight.dtype)
            logits = self.logits[: len(features)]
            if self.bias is None:
                torch.mm(features, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, features, self.weight.t(), out=logits)
            losses = self._softmax(logits, labels, scale)
            if not self.differentiate:
                return losses, None
            if self.weight_grad is not None:
                self._add_product(self.weight_grad, logits, features)
            if self.bias_grad is not None:
                self.bias_grad += logits.sum(0, dtype=self.sum_dtype)
            if not by:
                return losses, None
            arrived = torch.mm(logits, self.weight).to(normed.dtype)
            found = list(torch.autograd.grad(normed, by, arrived, allow_unused=True))
        gradient = found.pop(0) if wants_states else None
        for total, value in zip(self.known_grads, found, strict=True):
            if value is not None:
                total += value
        return losses, gradient

    def _softmax(self, logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        """The losses [n] of logits [n, V], over which G is written if gradients are wanted."""
        losses = torch.zeros_like(scale)
        for rows in _pieces(len(logits), self.slice_rows):
            part, target = logits[rows], labels[rows, None]
            # Over the logits themselves where they have the precision for it.
            values = part if part.dtype == self.sum_dtype else self.scratch[: len(part)]
            bounded = None
            if self.soft_cap is not None:
                bounded = torch.tanh(part.to(self.sum_dtype) / self.soft_cap)
                torch.mul(bounded, self.soft_cap, out=values)
                part = values
            # softmax = exp(a - max) / sum: no exponential overflows, however large the logits.
            if self.copies and part is not values:
                part = values.copy_(part)
            torch.sub(part, part.amax(-1, keepdim=True).to(self.sum_dtype), out=values)
            own = values.gather(-1, target)
            total = values.exp_().sum(-1, keepdim=True)
            found = total.log() - own
            losses[rows] = found[:, 0]
            if self.differentiate:
                # p - 1 without cancellation where p is almost 1.
                values.scatter_(-1, target, total * torch.expm1(-found))
                if bounded is not None:
                    values *= 1.0 - bounded.square_()
                written = values if self.copies else logits[rows]
                torch.mul(values, scale[rows, None] / total, out=written)
                if self.copies:
                    logits[rows] = written
        return losses

    def _add_product(self, total: Tensor, outer: Tensor, features: Tensor) -> None:
        """total [V, D] += outer^T [V, n] features [n, D]."""
        if total.dtype == features.dtype:
            total.addmm_(outer.t(), features)
            return
        # The product of a chunk has the dtype of its factors. In blocks, it is never whole.
        for start in range(0, len(total), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            product = torch.mm(outer[:, block].t(), features)
            if self.copies and product.numel() <= self.scratch.numel():
                # The softmax is done with its room.
                room = self.scratch.view(-1)[: product.numel()]
                product = room.view_as(product).copy_(product)
            total[block] += product


def _pieces(count: int, most: int) -> Iterator[slice]:
    """Cuts `count` tokens into as few pieces as `most` allows, as equal as they can be."""
    pieces = -(-count // most)
    for piece in range(pieces):
        yield slice(piece * count // pieces, (piece + 1) * count // pieces)


def _zeros(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(value, dtype=dtype, memory_format=torch.contiguous_format)


def _largest(scales: Sequence[Tensor]) -> Tensor:
    """The largest |scale|, or 1 if all are 0 or there are none."""
    everything = torch.cat([scale.detach().abs() for scale in scales])
    largest = everything.amax() if everything.numel() else everything.new_zeros(())
    return torch.where(largest > 0, largest, 1.0)


def _sum_dtype(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """What a linear layer multiplies in: autocast's dtype if on (it leaves float64 alone)."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _graph_is_retained() -> bool:
    """Whether this backward may be followed by another of the same graph.

    Torch tells only through a private function; should a version lack it, the answer is yes,
    which costs a copy of the gradients and is always right.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
