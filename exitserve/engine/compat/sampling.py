"""Tokens sampled behind a pass, each with what its request asks for, by vLLM's own sampler.

Read from `vllm/v1/sample/sampler.py`, `vllm/v1/sample/ops/topk_topp_sampler.py` and
`vllm/v1/worker/gpu_input_batch.py`.

Shapes: N rows, B rows of vLLM's batch, V vocabulary, K log-probabilities of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group
from vllm.v1.outputs import LogprobsTensors


@dataclass(frozen=True)
class Sampled:
    """A token that vLLM's sampler drew."""

    token: int
    seed_state: Tensor | None
    """Where its request's random numbers were before; None for a request without a seed."""
    logits: Tensor | None
    """[V] from which it was drawn; kept where log-probabilities are wanted, as these are."""
    logprobs: LogprobsTensors | None
    """[1, K]."""


class BatchSampler:
    """Samples for some rows of vLLM's batch, further tokens than the one that vLLM asks for."""

    def __init__(self, model_runner: Any) -> None:
        """Takes runner V1."""
        self._runner = model_runner

    def sample(
        self,
        logits: Tensor,
        ahead: Mapping[int, Sequence[int]],
        with_logprobs: Collection[int] = (),
    ) -> list[Sampled]:
        """Samples a token of each row, the same on all ranks.

        vLLM's logits processors know requests by their rows, so it gets logits for all of them.

        Args:
            logits: [N, V].
            ahead: by row, in the order of `logits`, the tokens that follow those vLLM knows of.
            with_logprobs: rows of which log-probabilities are wanted.
        """
        batch, rows = self._runner.input_batch, list(ahead)
        everyone = logits.new_zeros(batch.num_reqs, logits.shape[-1])
        everyone[rows] = logits
        asked, generators = batch.sampling_metadata, batch.generators
        own = {row: generators[row] for row in rows if row in generators}
        states = {row: one.get_state() for row, one in own.items()}
        outputs = list(asked.output_token_ids)  # empty where nobody needs them
        for row, more in ahead.items() if outputs else ():
            outputs[row] = [*outputs[row], *more]
        found = self._runner.sampler(
            everyone,
            replace(
                asked,
                generators=own,  # numbers of the others' seeds must not be used up
                output_token_ids=outputs,
                max_num_logprobs=asked.max_num_logprobs if with_logprobs else None,
                logprob_token_ids=None,  # who has some does not draft, nor who has a budget
                thinking_budget_state_holder=None,
            ),
        )
        tokens = found.sampled_token_ids[rows, 0]
        if get_tensor_model_parallel_world_size() > 1:
            tokens = get_tp_group().broadcast(tokens, src=0)
        return [
            Sampled(
                token,
                states.get(row),
                logits[place] if row in with_logprobs else None,
                row_of(found.logprobs_tensors, row) if row in with_logprobs else None,
            )
            for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True))
        ]

    def rewind(self, row: int, state: Tensor) -> None:
        """Takes a row's random numbers back to where they were, in a pass of a CPU."""
        generator = self._runner.input_batch.generators[row]
        generator.set_state(state)
        generator.remember()


def row_of(every: LogprobsTensors, row: int) -> LogprobsTensors:
    """[1, K] of [B, K]."""
    ids, values, ranks = (one[row : row + 1] for one in every[:3])
    return LogprobsTensors(ids, values, ranks)
