"""Runner V2's state of a model (`get_model_state_cls`): exits on a GPU.

Read from `vllm/v1/worker/gpu/model_runner.py` and `vllm/v1/worker/gpu/model_states/`. The runner
tells which requests come and go and what each pass holds, replays graphs that were captured with
`prepare_dummy_inputs`, and calls `postprocess_state` behind the sampler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from exitserve.engine.drafting.requests import Sampled, SlotRequests
from exitserve.engine.early_exit.device.batch import DeviceRequests, PassRows
from exitserve.engine.request import read_request
from exitserve.engine.state import state_of


class ExitModelState(DefaultModelState):
    """Exits whose tokens freeze."""

    def __init__(
        self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._requests: DeviceRequests = model.make_device_requests(self.max_num_reqs, device)
        self._rules = state_of(vllm_config).rules

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request came, or came back after a preemption."""
        super().add_request(req_index, new_req_data)
        prompt, params = new_req_data.prompt_token_ids, new_req_data.sampling_params
        running = len(self._requests.by_slot) + 1
        request = read_request(
            params, prompt, self._rules, name=new_req_data.req_id, running=running
        )
        self._requests.add(req_index, request)  # its earlier record, if it was preempted

    def remove_request(self, req_id: str) -> None:
        """A request has ended, or is preempted."""
        super().remove_request(req_id)
        self._requests.remove(req_id)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Fills in the rows of a pass; called for warm-ups too, whose requests are not known."""
        rows, tokens = input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding
        # Piecewise graphs are chosen by tokens: padding then adds tokens that belong to no row.
        one_each = int(input_batch.num_scheduled_tokens.max()) == 1 and rows == tokens
        self._requests.begin(
            PassRows(
                slots=input_batch.idx_mapping_np.tolist(),
                names=input_batch.req_ids,
                computed=input_batch.num_computed_tokens_np.tolist(),
                scheduled=input_batch.num_scheduled_tokens.tolist(),
                known=input_batch.prefill_len_np.tolist(),
                padded=rows if one_each else input_batch.num_reqs,
                padded_tokens=tokens,
            ),
            None if one_each else input_batch.logits_indices,
        )
        return {**super().prepare_inputs(input_batch, req_states), "exits": self._requests.rows}

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Tensor,
        attn_groups: Any,
        *others: Any,
        **more: Any,
    ) -> dict[str, Any]:
        """Makes the pass's metadata; the loop may change it (`without_reading_for`)."""
        served: Any = self.model
        served.device.attention_groups = attn_groups
        given = input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups
        return super().prepare_attn(*given, *others, **more)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """What a graph is captured with: rows without requests."""
        places, padding = None, None
        if num_tokens > num_reqs:
            places = torch.arange(num_reqs, device=self.device)
            padding = torch.ones(num_tokens, dtype=torch.bool, device=self.device)
        self._requests.rows.begin((), num_reqs, places, padding, warms_up=True)
        return {**super().prepare_dummy_inputs(num_reqs, num_tokens), "exits": self._requests.rows}

    def postprocess_state(self, idx_mapping: Tensor, num_sampled: Any, *others: Any) -> None:
        """The pass and its sampling are under way."""
        super().postprocess_state(idx_mapping, num_sampled, *others)
        self._requests.end()


class DraftingModelState(DefaultModelState):
    """Several tokens a step, of which some are final without full depth."""

    def __init__(
        self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._requests = SlotRequests(model.exit_state, self.max_num_reqs, device)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request came, or came back after a preemption."""
        super().add_request(req_index, new_req_data)
        prompt, params = new_req_data.prompt_token_ids, new_req_data.sampling_params
        self._requests.add(req_index, self._requests.read(params, prompt, new_req_data.req_id))

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Takes what a pass samples."""
        drafts = input_batch.num_draft_tokens_per_req
        judged = self._requests.begin(
            Sampled(
                slots=input_batch.idx_mapping_np.tolist(),
                names=input_batch.req_ids,
                drafts=[0] * input_batch.num_reqs if drafts is None else drafts.tolist(),
                places=input_batch.logits_indices,
                slot_of=input_batch.expanded_idx_mapping,
                ends=input_batch.cu_num_logits,
                positions=input_batch.positions,
                prompt_lengths=req_states.prompt_len.gpu,
                known_ids=req_states.all_token_ids.gpu,
            )
        )
        served: Any = self.model
        served.drafting.judge(judged)
        return super().prepare_inputs(input_batch, req_states)

    def postprocess_state(self, idx_mapping: Tensor, num_sampled: Any, *others: Any) -> None:
        """The pass and its sampling are under way."""
        super().postprocess_state(idx_mapping, num_sampled, *others)
        self._requests.end(num_sampled)
