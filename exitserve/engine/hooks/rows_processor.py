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
from exitserve.engine.recorder import check_trace
from exitserve.engine.state import state_of
from exitserve.errors import ExitServeError
from exitserve.policy import ExitRules


class RowsProcessor(LogitsProcessor):
    """Passes vLLM's batch changes on to `HostRequests`; leaves logits as they are."""

    rules: ExitRules | None = None
    """Set in the front-end process once the model is known, so that every field is checked."""
    serves_clients = False
    """Set in a server, whose clients may ask for a trace but not name its keys."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises `ValueError` (HTTP 400) for bad `exit_*` fields.

        Every request passes here on its way to the engine, whatever route it came by.
        """
        fields = sampling_params.extra_args or {}
        if cls.rules is not None:
            cls.rules.policy_for(fields)
            if cls.rules.num_drafts and sampling_params.logprob_token_ids:
                raise ExitServeError(
                    "logprob_token_ids is not supported where the first layers draft (modes defer "
                    "and verify): vLLM's rejection sampling has no log-probabilities of given "
                    "tokens. Leave it out, or use a server of another --mode."
                )
        check_trace(fields.get("exit_trace"), of_client=cls.serves_clients)

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
