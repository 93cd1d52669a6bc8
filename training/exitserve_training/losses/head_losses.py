"""Losses through a linear head, their gradients made in the forward pass.

Cross-entropy with the labels and divergence from a teacher, of several layers, in one pass over the
logits. Backward through a head would keep logits [M, V], or compute them again. The gradient of a
sum of such losses needs nothing that is unknown in forward but one factor, the upstream gradient u
of the sum. So each chunk of tokens is finished while its logits exist, layer by layer, with 3
products of size M * D * V, and the teacher's logits are computed once for all layers. With
x = norm(h) [M, D], head weight W [V, D], bias b and soft cap c:

    z = x W^T + b,  a = c tanh(z / c)  (a = z without a cap)
    total = sum over i of  s_i CE_i + k_i KL_i,   G = d total / d z
    dx = G W,  dW = G^T x,  db = G^T 1,  dh = (norm's own backward)(dx)

Backward multiplies all of it by u. `exitserve_kernels.logit_losses` makes CE, KL and G, which is
written over z: at any moment one chunk's logits of one layer exist, the teacher's beside them, and
the one [V, D] sum dW. s and k are divided by their largest entry first and that entry multiplied
back in backward: the entries of G then keep within float16, however small the mean's 1 / M is, and
a loss scale in u arrives before anything is rounded to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from exitserve.errors import ExitServeError
from exitserve_training.losses.head import OutputHead, Reading, Teacher, TokenLosses
from exitserve_training.losses.head_pass import HeadPass, Job, chunks, sum_dtype_of

CHUNK_TOKENS = 512
"""Tokens classified at once on a CPU. Measured on two cores, 1024 tokens, D = 1024, V = 32000,
float32, forward and backward: 4.0 s in chunks of 128, 3.2 s of 256, 2.7 s of 512, 2.6 s in one of
1024, whose logits are twice as many."""

_CHUNK_LOGITS = 2**27
"""Logits of a chunk on a GPU, which wants few, large kernels: 256 MB in bfloat16."""


_LINEAR = nn.Linear.forward


def chunk_size(device: torch.device, vocabulary: int) -> int:
    """Tokens to classify at once on a device."""
    return CHUNK_TOKENS if device.type == "cpu" else max(_CHUNK_LOGITS // vocabulary, CHUNK_TOKENS)


def head_losses(
    readings: Sequence[Reading],
    head: OutputHead,
    teacher: Teacher | None = None,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, list[TokenLosses]]:
    """Returns the weighted sum of all readings' losses, and each token's.

    The sum is a differentiable scalar in float32 (float64 for a float64 head). Products are
    computed in autocast's dtype or else the head's, softmax and sums in float32. Gradients cannot
    be differentiated again. With no token the sum is 0 with zero gradients. However many readings,
    there is one [V, D] sum of the head's gradients.

    Args:
        readings: at least one; all of the same N tokens if there is a teacher.
        head: its norm must treat each token by itself.
        teacher: needed by readings with a `divergence`.
        chunk_tokens: tokens whose logits may exist at once; None: what suits the device.

    Raises:
        ExitServeError: the head's linear part is more than an `nn.Linear`.
    """
    if not isinstance(head.linear, nn.Linear) or type(head.linear).forward is not _LINEAR:
        raise ExitServeError(
            f"the head is a {type(head.linear).__name__}, whose gradients only autograd knows; "
            f"expected nn.Linear itself."
        )
    if isinstance(head.linear, FSDPModule):
        # A head in shards of its own gets whole in its forward, which does not run here. What
        # FSDP does behind backward it also does for such parameters, at the end.
        head.linear.unshard()
    weight = head.linear.weight
    chunk = chunk_size(weight.device, len(weight)) if chunk_tokens is None else chunk_tokens
    for reading in readings:
        assert reading.hidden.ndim == 2, "states are [N, D]"
        assert (reading.labels is None) == (reading.cross_entropy is None), "they go together"
        assert reading.divergence is None or teacher is not None, "divergences need a teacher"
    known = _trainable(head.norm)
    job = Job(head, readings, teacher, chunk, tuple(known), torch.is_grad_enabled())
    states = [reading.hidden for reading in readings]
    total, *losses = _HeadLosses.apply(  # type: ignore[no-untyped-call]
        job, weight, head.linear.bias, *known.values(), *states
    )
    found = iter(losses)
    return total, [
        TokenLosses(
            None if reading.cross_entropy is None else next(found),
            None if reading.divergence is None else next(found),
        )
        for reading in readings
    ]


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


class _HeadLosses(torch.autograd.Function):
    """The header's formulas, from weight, bias, the norm's tensors and the readings' states."""

    @staticmethod
    def forward(ctx: Any, job: Job, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the weighted sum and the tokens' losses; keeps the gradients for backward."""
        first_states = 2 + len(job.names)
        wanted = [job.differentiate and needed for needed in ctx.needs_input_grad[1:]]
        gradients = [
            # Sums over tokens need float32; the gradient of a state has one summand.
            _zeros(value, sum_dtype_of(value) if place < first_states else value.dtype)
            if value is not None and wanted[place]
            else None
            for place, value in enumerate(inputs)
        ]
        head = HeadPass(job, inputs[:first_states], gradients[:first_states], any(wanted))
        found = [_empty_losses(reading, head.sum_dtype) for reading in job.readings]
        states_grads = gradients[first_states:]
        for asked, parts in chunks(job):
            taught = head.taught(asked)
            for reading, part, losses, total in zip(
                job.readings, parts, found, states_grads, strict=True
            ):
                gradient = head.run(reading, part, losses, taught, wants_states=total is not None)
                if total is not None and gradient is not None:
                    total[part.rows] = gradient
        sums = torch.zeros((), dtype=head.sum_dtype, device=head.device)
        for reading, losses in zip(job.readings, found, strict=True):
            scales = (reading.cross_entropy, reading.divergence)
            for scale, each in zip(scales, losses, strict=True):
                if scale is not None and each is not None:
                    sums += (scale.to(each.dtype) * each).sum()
        given = [each for losses in found for each in losses if each is not None]
        ctx.mark_non_differentiable(*given)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.dtypes = [None if value is None else value.dtype for value in inputs]
        ctx.save_for_backward(head.largest)
        return sums, *given

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


def _zeros(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(value, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_losses(reading: Reading, dtype: torch.dtype) -> TokenLosses:
    """Room for what is asked of a reading."""
    given = (reading.cross_entropy, reading.divergence)
    return TokenLosses(
        *(None if one is None else torch.zeros_like(one, dtype=dtype) for one in given)
    )


def _graph_is_retained() -> bool:
    """Whether this backward may be followed by another of the same graph.

    Torch tells only through a private function; should a version lack it, the answer is yes,
    which costs a copy of the gradients and is always right.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
