"""The exit state of one engine, which the model and vLLM's hooks share."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from exitserve.engine.compat.config import eos_token_ids
from exitserve.engine.options import rules_from
from exitserve.engine.recorder import Recorder
from exitserve.engine.request import RunningRequests
from exitserve.policy import ExitRules


class EngineState:
    """Rules, counts, and the requests that run."""

    def __init__(self, rules: ExitRules, eos_token_ids: Tensor) -> None:
        """Starts without requests; takes the model's rules and its ends of sequence [K]."""
        self.rules = rules
        self.eos_token_ids = eos_token_ids
        self.recorder = Recorder(rules.num_layers, rules.exit_layers)
        self.requests: RunningRequests | None = None
        """Set by the loop that runs them."""


_STATES: WeakValueDictionary[str, EngineState] = WeakValueDictionary()
"""By vLLM's instance id. Weak, so that an engine's state ends with its model."""


def state_of(vllm_config: Any) -> EngineState:
    """The exit state of the engine that `vllm_config` describes, made at the first call.

    vLLM makes the model and the logits processor of one engine in one process, each from (a copy
    of) the same config, and hands neither to the other. For these only: later
    the config's id is another (`ExitWorkerExtension._exit_state`).
    """
    key = vllm_config.instance_id
    state = _STATES.get(key)
    if state is None:
        state = EngineState(rules_from(vllm_config), eos_token_ids(vllm_config))
        _STATES[key] = state
    return state
