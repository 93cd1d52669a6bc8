"""Drafts on vLLM's runner V1, which CPUs run.

Where the last tokens of a request occurred in it before, what followed them is drafted,
which costs nothing. Else the first layers draft. A request whose drafts are accepted less often
than expected drafts less: a text that does not repeat, or samples of a flat distribution.

vLLM's rejection sampler judges the drafts. The runner schedules them as those of a draft model;
this drafter runs the target's own first layers, final norm and head, which find the target's keys
and values by the names of its layers. A draft writes the first layers' keys and values where the
judging pass will write all of them again; those of rejected drafts lie behind the sequence's end,
where nothing reads them.

Read from `vllm/v1/worker/gpu_model_runner.py` and `vllm/v1/spec_decode/llm_base_proposer.py`. The
host knows all of a pass before it drafts, so requests draft as many tokens as they can use: none
in mode "off", none of a request with a seed, whose random numbers rejection sampling would use up
by the number of drafts, and none beyond the end of the answer.

Shapes: B rows, R rows that draft, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from exitserve.costs.drafting import accepted_of
from exitserve.engine.compat.runner import repair_sampling_with_drafts
from exitserve.engine.compat.seeds import seed_keeper
from exitserve.engine.drafting.forward import DraftingLoop
from exitserve.engine.drafting.requests import RowRequests
from exitserve.engine.options import PROCESSOR, drafts_from


class FirstLayersProposer(DraftModelProposer):
    """To vLLM a draft model; it has no weights, cache or buffers of its own."""

    def __init__(self, runner: DraftingRunner) -> None:
        # Without vLLM's own, which makes room for a second model.
        self._runner = runner

    def load_model(self, target_model: Any) -> None:
        """No weights are loaded: the draft is part of the target."""
        self._loop: DraftingLoop = target_model.drafting

    def initialize_attn_backend(self, *args: Any, **more: Any) -> None:
        """The target's metadata builders are used."""
        names = self._loop.attention_layers
        groups = [group for found in self._runner.attn_groups for group in found]
        self._groups = [one for one in groups if names.intersection(one.layer_names)]

    def initialize_cudagraph_keys(self, *args: Any) -> None:
        """No graphs."""

    def dummy_run(self, *args: Any, **more: Any) -> None:
        """The target's warm-up compiles the first layers."""

    def draft(self, rows: Sequence[int], last: Sequence[int], count: int) -> list[list[int]]:
        """Drafts some tokens of each row [R].

        Args:
            rows: of vLLM's batch, ascending.
            last: [R] each one's last token, whose keys and values are not there yet.
            count: of tokens.
        """
        runner = self._runner
        longest = runner.max_model_len - 1
        known = runner.input_batch.num_tokens_no_spec[rows]
        positions = torch.from_numpy(known).long() - 1
        tokens, found = torch.tensor(last), []
        for _ in range(count):
            metadata, slots = self._attention(rows, positions)
            with set_forward_context(
                metadata, runner.vllm_config, num_tokens=len(rows), slot_mapping=slots
            ):
                tokens = self._loop.head.draft(self._loop.draft(tokens, positions))
            found.append(tokens)
            positions = (positions + 1).clamp_(max=longest)
        self._loop.count_drafts(count)
        return torch.stack(found, dim=1).tolist()

    def _attention(
        self, rows: Sequence[int], positions: Tensor
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and cache slots by layer, for one token of each row [R] at a position [R]."""
        count, batch = len(rows), self._runner.input_batch
        starts = torch.arange(count + 1, dtype=torch.int32)
        lengths = (positions + 1).int()
        longest = int(lengths.max())
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for group in self._groups:
            table = batch.block_table[group.kv_cache_group_id]
            blocks = table.get_device_tensor(batch.num_reqs)
            if count < batch.num_reqs:
                blocks = blocks[list(rows)]
            size = table.block_size
            own = blocks.gather(1, (positions // size)[:, None])[:, 0] * size + positions % size
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=longest,
                block_table_tensor=blocks,
                slot_mapping=own,
            )
            metadata |= dict.fromkeys(group.layer_names, group.build_metadata(common))
            slots |= dict.fromkeys(group.layer_names, own)
        return metadata, slots


class DraftingRunner(CPUModelRunner):
    """vLLM's runner V1 of a CPU, whose drafts come from the model's first layers."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        model_config, speculation = vllm_config.model_config, vllm_config.speculative_config
        # vLLM refuses logits processors beside drafts. Ours is one in name only, for the front end,
        # which has its list already.
        own = [one for one in model_config.logits_processors or [] if one != PROCESSOR]
        model_config.logits_processors = own or None
        super().__init__(vllm_config, device)
        self.drafter = FirstLayersProposer(self)
        self._drafts = drafts_from(vllm_config)
        speculation.disable_padded_drafter_batch = True  # drafts come when the host has the samples
        # Else all rows would be sent drafts of zeros once one comes near the end of its context.
        self.effective_drafter_max_model_len = self.max_model_len + self.num_spec_tokens
        self._keep_seeds = seed_keeper(self)
        repair_sampling_with_drafts()

    def load_model(self, *args: Any, **more: Any) -> None:
        """Loads the model, of which the drafter is a part."""
        super().load_model(*args, **more)
        self._requests = RowRequests(self)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Prepares a pass, and tells the model which of its tokens may be final.

        One without drafts is prepared and sampled as in an engine that never has any: vLLM would
        prepare to judge its no drafts, and judge them. That takes time, and on a CPU fails where a
        request has a top-k: it takes the maximum of all k, and of none there is none.
        """
        if self.input_batch.generators:
            self._keep_seeds()
        drafts, speculation = scheduler_output.scheduled_spec_decode_tokens, self.speculative_config
        self.speculative_config = speculation if drafts else None
        try:
            found = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = speculation
        new = {one.req_id for one in scheduler_output.scheduled_new_reqs}
        judged = self._requests.begin(num_scheduled_tokens.tolist(), drafts, found[0], new)
        self.get_model().drafting.judge(judged)  # type: ignore[union-attr, operator]
        return found

    def propose_draft_token_ids(  # type: ignore[override]  # with lists of rows, as vLLM's n-grams
        self, scheduler_output: Any, sampled: list[list[int]], *others: Any
    ) -> list[list[int]]:
        """Counts what a pass gave each row [B]; returns each row's drafts."""
        requests = self._requests
        requests.end(sampled)
        most = scheduler_output.num_spec_tokens_to_schedule
        may = [requests.may_draft(row, own, most) for row, own in enumerate(sampled)]
        found = [self._draft_of_text(row, own) for row, own in enumerate(may)]
        # Rows without drafts of their text, for which drafts of the first layers may pay.
        shares = {
            row: share
            for row, own in enumerate(may)
            if own and not found[row] and (share := requests.share(row, "layers"))
            if self._drafts.of_layers(len(may), share)
        }
        rows = [*shares]
        count = self._drafts.of_some(len(may), [*shares.values()], *requests.expected())
        if count := min(count, max((may[row] for row in rows), default=0)):
            last = [sampled[row][-1] for row in rows]
            drafts = self.drafter.draft(rows, last, count)  # type: ignore[union-attr]
            expected = [self._drafts.acceptance**number for number in range(1, count + 1)]
            for row, own in zip(rows, drafts, strict=True):
                found[row] = own[: may[row]]
                requests.expect(row, "layers", expected)
        return found

    def _draft_of_text(self, row: int, most: int) -> list[int]:
        """What a row drafts from what it read and wrote, at most so many tokens (`following`)."""
        share = self._requests.share(row, "text") if most else 0.0
        if not share:
            return []
        batch = self.input_batch
        counts = self._drafts.of_text(batch.num_reqs, share)
        tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
        found, match = following(tokens, counts)
        found = found[:most]
        if found:
            self._requests.expect(row, "text", accepted_of(match)[: len(found)])
        return found


def following(tokens: NDArray[np.int32], counts: Sequence[int]) -> tuple[list[int], int]:
    """What followed the last occurrence of the most of its last tokens, and how many these were.

    As vLLM's n-grams, whose code one engine of a process only can call: it loads numba, among whose
    modules `vllm.triton_utils.dispatcher` then fails at the next one.

    Args:
        tokens: [T] what the request read and wrote.
        counts: how many tokens are drafted, by how many had occurred; the last count is that of
            longer matches, too.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found, length = ends, 0
    while len(ends) and length < len(counts) - 1:
        found, length = ends, length + 1
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-1 - length]]
    if not length:
        return [], 0
    start = found[-1] + 1
    follows = tokens[start : start + counts[length]].tolist()
    # Of a text that repeats, what followed ends where the text does: it goes on in a circle.
    return list(islice(cycle(follows), counts[length])), length
