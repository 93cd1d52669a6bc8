"""The model runner: its batch, its requests, and its sampling beside drafts.

Read from `vllm/v1/worker/gpu_model_runner.py` and `vllm/v1/worker/gpu_input_batch.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils import cpu_triton_utils


def repair_sampling_with_drafts() -> None:
    """On a CPU, lets requests whose drafts are judged have their own temperature.

    vLLM 0.32 spreads a request's temperature, top-k and top-p over its drafts by a kernel whose CPU
    version (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes into a converted copy
    of its output unless that is of 64-bit integers: all three are then whatever lay in memory, and
    samples follow another distribution. vLLM's registry takes a better one, and takes vLLM's own
    again for each engine that starts later in this process: then it finds ours in its place.
    """
    if current_platform.is_cpu() and not HAS_TRITON:
        cpu_triton_utils._expand_kernel_impl = _expand
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: float,
    replace_to: float,
    _most: int | None = None,
) -> None:
    """Repeats each of `values` [B] for the tokens that end before `ends` [B], into `output` [T]."""
    values = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))


@contextmanager
def runner_class(own: type) -> Iterator[None]:
    """Lets vLLM's worker of a CPU make a runner V1 of another class: its own is not asked for it,
    as that of a GPU is (`_make_model_runner`)."""
    from vllm.v1.worker import cpu_worker

    names = vars(cpu_worker)
    given, names["CPUModelRunner"] = names["CPUModelRunner"], own
    try:
        yield
    finally:
        names["CPUModelRunner"] = given


def watch_ends(model_runner: Any, forget: Callable[[Iterable[str]], None]) -> None:
    """Lets runner V2 tell `forget` the internal ids of requests that have ended.

    To a model's state, V2 tells the end of a request as it tells a preemption; and it has no
    record of preempted requests that could be asked, as V1 has.
    """
    finish = model_runner.finish_requests

    def finish_requests(scheduler_output: Any) -> None:
        finish(scheduler_output)
        forget(scheduler_output.finished_req_ids)

    model_runner.finish_requests = finish_requests
