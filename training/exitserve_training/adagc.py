"""AdaGC: clips each parameter tensor's gradient by the moving average of its own norm.

Method: Wang et al., "AdaGC" (arXiv 2502.11034), which the simreg paper clips all its runs with
(table 5: lambda = 1.04, beta = 0.99). For the gradient g_i of tensor i at a step:

    warm-up     s   = min(1, 1 / |g|), |g| the norm of all gradients together
                avg_i <- min(avg_i, |s g_i|)
    afterwards  s_i = min(1, lambda * avg_i / |g_i|)
                avg_i <- beta * avg_i + (1 - beta) * |s_i g_i|

and g_i becomes s_i g_i (s g_i in the warm-up). So a spike neither moves the tensor far nor enters
the average, and does not scale down other tensors. An average can grow by the factor
1 + (1 - beta) * (lambda - 1) a step at most, 0.04 % with the defaults: norms that truly grow are
followed slowly, and a longer warm-up does not help, since it keeps the smallest norm.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from exitserve.errors import ExitServeError


class AdaGC:
    """Clips gradients in place, once per optimizer step, after they are complete.

    That is: after accumulation and after the all-reduce of data parallelism. Of gradients in shards
    (FSDP 2) each process scales its own by the norm of the whole. It replaces global clipping
    (`max_grad_norm` must be 0).

    Choices the method leaves open: a gradient of exactly zero leaves its average untouched, since
    an average of zero would clip that tensor to zero for good; a tensor first seen after the
    warm-up is clipped to norm 1 once and begins its average there. The simreg paper names no
    number of warm-up steps.
    """

    def __init__(self, *, ratio: float = 1.04, beta: float = 0.99, warmup_steps: int = 100) -> None:
        """Takes lambda, beta, and for how many steps gradients are clipped globally, to norm 1."""
        self.ratio, self.beta, self.warmup_steps = ratio, beta, warmup_steps
        self._steps = 0
        self._averages: dict[str, float] = {}

    def clip(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Scales the gradients of `model.named_parameters()` in place and moves the averages on.

        Raises:
            ExitServeError: a gradient is not finite; none of them has then been changed.
        """
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
        norms = _finite_norms(gradients)
        total = math.hypot(*norms.values())
        for name, gradient in gradients.items():
            norm = norms[name]
            if norm == 0.0:
                continue
            scale = self._scale(name, norm, total)
            if scale < 1.0:
                gradient.mul_(scale)
            self._move_average(name, norm * scale)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The steps taken and each tensor's average norm: plain numbers, for JSON."""
        return {"steps": self._steps, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`; the arguments of the constructor are not part of it."""
        self._steps, self._averages = int(state["steps"]), dict(state["averages"])

    def _scale(self, name: str, norm: float, total: float) -> float:
        if self._steps < self.warmup_steps:
            return min(1.0, 1.0 / total)
        average = self._averages.get(name)
        return min(1.0, (1.0 if average is None else self.ratio * average) / norm)

    def _move_average(self, name: str, norm: float) -> None:
        average = self._averages.get(name)
        if average is None:
            self._averages[name] = norm
        elif self._steps < self.warmup_steps:
            self._averages[name] = min(average, norm)
        else:
            self._averages[name] = self.beta * average + (1.0 - self.beta) * norm


def _finite_norms(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Each gradient's norm in float32, by one transfer from the device."""
    if not gradients:
        return {}
    found = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
    together = torch.stack([norm.to(found[0].device) for norm in found])
    norms: dict[str, float] = dict(zip(gradients, whole(together).tolist(), strict=True))
    for name, gradient in gradients.items():
        if not math.isfinite(norms[name]):
            # Squares of finite numbers may be too large for float32.
            norms[name] = whole(torch.linalg.vector_norm(gradient, dtype=torch.float64)).item()
        if not math.isfinite(norms[name]):
            raise ExitServeError(f"the gradient of {name!r} has the norm {norms[name]}")
    return norms


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may lie in shards, as one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
