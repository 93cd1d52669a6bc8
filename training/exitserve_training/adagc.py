"""AdaGC: clips each parameter tensor's gradient by the moving average of its own norm.

Method: Wang et al., "AdaGC" (arXiv 2502.11034), which the simreg paper clips all its runs with
(table 5: lambda = 1.04, beta = 0.99). For the gradient g_i of tensor i at a step:

    warm-up     s   = min(1, max_norm / |g|), |g| the norm of all gradients together
                avg_i <- min(avg_i, |s g_i|)
    afterwards  s_i = min(1, lambda * avg_i / |g_i|)
                avg_i <- beta * avg_i + (1 - beta) * |s_i g_i|

and g_i becomes s_i g_i (s g_i in the warm-up). So a spike neither moves the tensor far nor enters
the average, and does not scale down other tensors. An average can grow by the factor
1 + (1 - beta) * (lambda - 1) a step at most, 0.04 % with the defaults: norms that truly grow are
followed slowly, and a longer warm-up does not help, since it keeps the smallest norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
from torch import Tensor

from exitserve.errors import ExitServeError


class AdaGCState(TypedDict):
    """What a resumed run needs: plain numbers, for JSON or `torch.save` alike."""

    steps: int
    averages: dict[str, float]


class AdaGC:
    """Clips gradients in place, once per optimizer step, after they are complete.

    That is: after accumulation, after a gradient scaler's unscaling, after the all-reduce of data
    parallelism; sharded gradients (FSDP, ZeRO) are not supported. It replaces global clipping
    (`max_grad_norm` of the Trainer must be 0).

    Choices the method leaves open: a gradient of exactly zero leaves its average untouched, since
    an average of zero would clip that tensor to zero for good; a tensor first seen after the
    warm-up is clipped to `max_norm` once and begins its average there.

    Args:
        ratio: lambda >= 1, how far a norm may exceed its average.
        beta: in [0, 1), how slowly the averages follow.
        warmup_steps: calls of `clip` that clip globally; the simreg paper names no number.
        max_norm: the bound on the global norm during the warm-up.

    Raises:
        ExitServeError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        ratio: float = 1.04,
        beta: float = 0.99,
        warmup_steps: int = 100,
        max_norm: float = 1.0,
    ) -> None:
        _require(ratio >= 1.0 and math.isfinite(ratio), "ratio", ratio, "at least 1, such as 1.04")
        _require(0.0 <= beta < 1.0, "beta", beta, "in [0, 1), such as 0.99")
        _require(warmup_steps >= 0, "warmup_steps", warmup_steps, "0 or more, such as 100")
        _require(max_norm > 0.0, "max_norm", max_norm, "positive, such as 1.0")
        self.ratio = ratio
        self.beta = beta
        self.warmup_steps = warmup_steps
        self.max_norm = max_norm
        self._steps = 0
        self._averages: dict[str, float] = {}

    def clip(self, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Scales the gradients of `parameters` in place and moves the averages on.

        Args:
            parameters: `model.named_parameters()`, or bare parameters, which are then known by
                their place ("0", "1", ...) and must come in the same order at every step. Those
                whose gradient is None are passed over.

        Returns:
            `grad_norm` and `clipped_grad_norm`, the norms of all gradients together before and
            after; `clipped_fraction`, the share of tensors that were scaled down; `least_scale`,
            the smallest factor (1 if none was).

        Raises:
            ExitServeError: a gradient is not finite, or a name comes twice; no gradient and no
                average has then been changed.
        """
        gradients = _named_gradients(parameters)
        norms = _finite_norms(gradients, self._steps)
        total = math.hypot(*norms.values())
        scales = {name: self._scale(name, norm, total) for name, norm in norms.items()}
        with torch.no_grad():
            for name, gradient in gradients.items():
                if scales[name] < 1.0:
                    gradient.mul_(scales[name])
        clipped = {name: norm * scales[name] for name, norm in norms.items()}
        for name, norm in clipped.items():
            self._move_average(name, norm)
        self._steps += 1
        reduced = sum(scale < 1.0 for scale in scales.values())
        return {
            "grad_norm": total,
            "clipped_grad_norm": math.hypot(*clipped.values()),
            "clipped_fraction": reduced / max(len(scales), 1),
            "least_scale": min(scales.values(), default=1.0),
        }

    def state_dict(self) -> AdaGCState:
        """Returns the steps taken and each tensor's average norm."""
        return {"steps": self._steps, "averages": dict(self._averages)}

    def load_state_dict(self, state: AdaGCState | Mapping[str, object]) -> None:
        """Goes on from a `state_dict`; the arguments of the constructor are not part of it.

        Raises:
            ExitServeError: `state` is no state of an AdaGC.
        """
        steps, averages = state.get("steps"), state.get("averages")
        if not isinstance(steps, int) or steps < 0 or not isinstance(averages, Mapping):
            raise ExitServeError(
                f"this is not an AdaGC state: it has the keys {sorted(state)}; expected 'steps' "
                f"(a whole number) and 'averages' (tensor name to norm)."
            )
        for name, average in averages.items():
            if not isinstance(average, float) or not 0.0 < average < math.inf:
                raise ExitServeError(
                    f"the AdaGC average of {name!r} is {average!r}; expected a positive number."
                )
        self._steps = steps
        self._averages = dict(averages)

    def _scale(self, name: str, norm: float, total: float) -> float:
        if norm == 0.0:
            return 1.0
        if self._steps < self.warmup_steps:
            return min(1.0, self.max_norm / total)
        average = self._averages.get(name)
        bound = self.max_norm if average is None else self.ratio * average
        return min(1.0, bound / norm)

    def _move_average(self, name: str, norm: float) -> None:
        if norm == 0.0:
            return
        average = self._averages.get(name)
        if average is None:
            self._averages[name] = norm
        elif self._steps < self.warmup_steps:
            self._averages[name] = min(average, norm)
        else:
            self._averages[name] = self.beta * average + (1.0 - self.beta) * norm


def _named_gradients(
    parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for place, entry in enumerate(parameters):
        name, parameter = entry if isinstance(entry, tuple) else (str(place), entry)
        if parameter.grad is None:
            continue
        if name in gradients:
            raise ExitServeError(f"parameter {name!r} comes twice; each needs a name of its own.")
        gradients[name] = parameter.grad
    return gradients


def _finite_norms(gradients: Mapping[str, Tensor], step: int) -> dict[str, float]:
    """Each gradient's norm, in at least float32, by one transfer from the device."""
    if not gradients:
        return {}
    found = [_norm(gradient) for gradient in gradients.values()]
    values: list[float] = torch.stack([norm.to(found[0]) for norm in found]).tolist()
    norms = dict(zip(gradients, values, strict=True))
    for name, gradient in gradients.items():
        if not math.isfinite(norms[name]):
            norms[name] = _norm_of_huge(name, gradient, norms[name], step)
    return norms


def _norm(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=wide)
    return norm


def _norm_of_huge(name: str, gradient: Tensor, norm: float, step: int) -> float:
    """The norm where squaring overflowed; refuses a gradient that is itself not finite."""
    largest = float(gradient.detach().abs().max())
    if not math.isfinite(largest):
        raise ExitServeError(
            f"the gradient of {name!r} has the norm {norm} at step {step}, so it is not finite; "
            f"skip this optimizer step (as a float16 gradient scaler does), or find the batch or "
            f"lower the learning rate if it recurs. Nothing was clipped."
        )
    return largest * float(_norm(gradient.detach() / largest))


def _require(fits: bool, name: str, value: float, allowed: str) -> None:
    if not fits:
        raise ExitServeError(f"{name} {value} must be {allowed}.")
