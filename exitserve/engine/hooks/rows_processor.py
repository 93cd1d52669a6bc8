"""The rows of runner V1's batch, before every forward pass.

`RowsProcessor` is a vLLM logits processor in name only: its hook runs before every forward pass
with the rows that came, went or moved, which is what the model needs to know.

Shapes: B rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from exitserve.engine.early_exit.batch import HostRequests
from exitserve.engine.request import FieldCheck
from exitserve.engine.state import state_of


class RowsProcessor(FieldCheck, LogitsProcessor):
    """Passes vLLM's batch changes on to `HostRequests`; leaves logits as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._state = state_of(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """True: logits stay as they are."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each forward pass, with what changed in the batch."""
        requests = self._state.requests
        assert isinstance(requests, HostRequests), "the model was made before"
        if batch_update is not None:
            requests.update(batch_update)
        requests.keep_seeds()

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, V] as they are."""
        return logits
