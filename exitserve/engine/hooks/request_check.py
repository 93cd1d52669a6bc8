"""Each request's `exit_*` fields, checked when a request reaches an engine with runner V2."""

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from exitserve.engine.request import FieldCheck


class RequestCheck(FieldCheck, LogitsProcessor):
    """A logits processor in name only: vLLM asks it about parameters when a request comes."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: logits stay as they are."""
        return False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Returns the logits [S, V] as they are; not called."""
        return logits
