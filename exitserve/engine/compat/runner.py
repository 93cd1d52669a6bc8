"""The model runner: its batch, its requests, and its sampling beside drafts.

Read from `vllm/v1/worker/gpu_model_runner.py` and `vllm/v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
)
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from exitserve.engine.compat.sampling import Sampled, row_of


def request_ids(model_runner: Any) -> Callable[[], list[str]]:
    """Reads the internal request id of each batch row, in row order."""
    return lambda: list(model_runner.input_batch.req_ids)


def restore_processors(model_runner: Any, vllm_config: Any, own: LogitsProcessor) -> None:
    """Puts back the logits processors that vLLM leaves out beside speculative decoding.

    That is `own`, which follows the batch, and those for `min_p` and `logit_bias`: vLLM would not
    apply them to drafts that it judges, but a request with either has none of these
    (`exitserve.engine.requests`).
    """
    processors, device = model_runner.input_batch.logitsprocs, model_runner.device
    others = (MinPLogitsProcessor, LogitBiasLogitsProcessor)
    there = {type(one) for one in processors.all}
    for one in (own, *(kind(vllm_config, device, False) for kind in others)):
        if type(one) not in there:
            invariant = one.is_argmax_invariant()
            kept = processors.argmax_invariant if invariant else processors.non_argmax_invariant
            kept.append(one)


def draft_to_the_end(model_runner: Any) -> None:
    """Lets drafts be asked for up to the end of the context.

    Else vLLM sends every row of the batch drafts of zeros (`_input_fits_in_drafter`) once one of
    its rows comes near.
    """
    model_runner.effective_drafter_max_model_len = model_runner.max_model_len + (
        model_runner.num_spec_tokens
    )


def repair_sampling_with_drafts() -> None:
    """On a CPU, lets requests whose drafts are judged have their own temperature.

    vLLM 0.32 spreads a request's temperature, top-k and top-p over its drafts by a kernel whose CPU
    version (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes into a converted copy
    of its output unless that is of 64-bit integers: all three are then whatever lay in memory, and
    samples follow another distribution. vLLM's registry takes a better one.
    """
    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def plain_without_drafts(model_runner: Any) -> None:
    """Lets passes without drafts be prepared and sampled as in an engine that never has any.

    vLLM would prepare to judge their no drafts, and judge them. That takes time, and on a CPU fails
    where a request has a top-k: it takes the maximum of all k, and of none there is none.
    """
    prepare, speculation = model_runner._prepare_inputs, model_runner.speculative_config

    def prepare_inputs(scheduler_output: Any, *others: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare(scheduler_output, *others)
        model_runner.speculative_config = None
        try:
            return prepare(scheduler_output, *others)
        finally:
            model_runner.speculative_config = speculation

    model_runner._prepare_inputs = prepare_inputs


def accept_decided(
    model_runner: Any, decided: Callable[[], Sequence[Sequence[Sampled | None]] | None]
) -> None:
    """Lets drafts that exits decided be taken as they are.

    To judge such drafts, vLLM would go several times over logits of the whole vocabulary for each
    of them, and use up the numbers of seeds.

    Args:
        model_runner: runner V1.
        decided: gives the drafts of each row [B] of the current pass, if exits decided all of them.
            Its logits may then be of each row's last token alone [B, V].
    """
    sampler = model_runner.rejection_sampler
    judge = sampler.forward

    def forward(metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        drafted = decided()
        if drafted is None:
            return judge(metadata, draft_probs, logits, sampling_metadata)
        counts = metadata.num_draft_tokens
        if len(logits) != len(counts):  # of all samples
            logits = logits[metadata.bonus_logits_indices]
        found = sampler.sampler(logits, sampling_metadata, predict_bonus_token=True)
        drafts, last = iter(metadata.draft_token_ids.tolist()), found.sampled_token_ids.tolist()
        rows = [[*islice(drafts, count), *own] for count, own in zip(counts, last, strict=True)]
        columns = zip_longest(*rows, fillvalue=PLACEHOLDER_TOKEN_ID)
        tokens = torch.tensor(list(columns), dtype=torch.int32).T
        logprobs = found.logprobs_tensors
        if logprobs is not None:
            logprobs = _joined(drafted, logprobs, tokens.shape[1])
        return replace(found, sampled_token_ids=tokens, logprobs_tensors=logprobs)

    sampler.forward = forward


def _joined(
    drafted: Sequence[Sequence[Sampled | None]], last: LogprobsTensors, width: int
) -> LogprobsTensors:
    """Log-probabilities of drafts and of each row's last token, as vLLM has those of judged ones.

    Args:
        drafted: [B] each row's drafts; where log-probabilities are not wanted, they become zeros.
        last: [B, K] of each row's last token.
        width: tokens of the row that has most.

    Returns:
        [B * width, K].
    """
    count = last.logprobs.shape[1]
    ids, values, ranks = (one.new_zeros(len(drafted), width, *one.shape[1:]) for one in last[:3])
    for row, drafts in enumerate(drafted):
        every = [None if one is None else one.logprobs for one in drafts]
        for place, one in enumerate([*every, row_of(last, row)]):
            if one is not None:  # others wanted more of them, or less, when it was drafted
                ids[row, place, : one.logprobs.shape[1]] = one.logprob_token_ids[0, :count]
                values[row, place, : one.logprobs.shape[1]] = one.logprobs[0, :count]
                ranks[row, place] = one.selected_token_ranks[0]
    return LogprobsTensors(ids.flatten(0, 1), values.flatten(0, 1), ranks.flatten())


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


def living_requests(model_runner: Any) -> Callable[[str], bool]:
    """Tells whether a request, by its internal id, has not ended; preempted ones have not."""
    return lambda request_id: request_id in model_runner.requests


def watch_ends(model_runner: Any, forget: Callable[[Iterable[str]], None]) -> None:
    """Lets runner V2 tell `forget` the internal ids of requests that have ended.

    To a model's state, V2 tells the end of a request as it tells a preemption; and it has no
    record of preempted requests that could be asked, as V1 has (`living_requests`).
    """
    finish = model_runner.finish_requests

    def finish_requests(scheduler_output: Any) -> None:
        finish(scheduler_output)
        forget(scheduler_output.finished_req_ids)

    model_runner.finish_requests = finish_requests
