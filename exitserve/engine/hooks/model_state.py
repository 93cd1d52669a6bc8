"""Runner V2's state of a model (`get_model_state_cls`): exits on a GPU.

Read from `vllm/v1/worker/gpu/model_runner.py` and `vllm/v1/worker/gpu/model_states/`. The runner
tells which requests come and go and what each pass holds, replays graphs that were captured with
`prepare_dummy_inputs`, and calls `postprocess_state` behind the sampler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from exitserve.engine.device.requests import DeviceRequests, PassRows
from exitserve.engine.requests import read_request
from exitserve.engine.state import state_of


class ExitModelState(DefaultModelState):
    """vLLM's state of a decoder, and the exits of its requests."""

    def __init__(
        self, vllm_config: Any, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._rules = state_of(vllm_config).rules
        served: Any = model
        self._requests: DeviceRequests = served.make_device_requests(self.max_num_reqs, device)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request came, or came back after a preemption."""
        super().add_request(req_index, new_req_data)
        prompt, params = new_req_data.prompt_token_ids, new_req_data.sampling_params
        request = read_request(params, prompt, self._rules, name=new_req_data.req_id)
        self._requests.add(req_index, request)

    def remove_request(self, req_id: str) -> None:
        """A request has ended, or is preempted."""
        super().remove_request(req_id)
        self._requests.remove(req_id)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Fills in the rows of a pass; called for warm-ups too, whose requests are not known."""
        one_each = int(input_batch.num_scheduled_tokens.max()) == 1
        self._requests.begin(
            PassRows(
                slots=input_batch.idx_mapping_np.tolist(),
                names=input_batch.req_ids,
                computed=input_batch.num_computed_tokens_np.tolist(),
                scheduled=input_batch.num_scheduled_tokens.tolist(),
                known=input_batch.prefill_len_np.tolist(),
                padded=input_batch.num_reqs_after_padding if one_each else input_batch.num_reqs,
                padded_tokens=input_batch.num_tokens_after_padding,
            ),
            None if one_each else input_batch.logits_indices,
        )
        return {**super().prepare_inputs(input_batch, req_states), "exits": self._requests.rows}

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
