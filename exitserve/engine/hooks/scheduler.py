"""The scheduler: prefix-cache isolation of every request.

Keys and values propagated by an early exit are approximations. A request's exit policy goes into
the salt of its block hashes, so cached blocks serve requests of the same policy only, whichever
HTTP route or Python call the request came from.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from exitserve.engine.compat.processes import end_core_with_parent
from exitserve.engine.options import drafts_from, rules_from
from exitserve.engine.request import policy_of
from exitserve.policy import ExitPolicy


def joint_salt(policy: ExitPolicy, own: str | None) -> str | None:
    """The salt of a request's block hashes, from its policy and the salt that it came with.

    Different pairs have different salts, whatever a client sends: a policy's salt holds no bar, so
    the first bar ends it, and a request's own salt never stands in its place.
    """
    salt = policy.cache_salt()
    return salt if own is None else f"{salt or ''}|{own}"


class _Salted:
    """Exit policies in block hashes; put it before one of vLLM's schedulers."""

    vllm_config: Any
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exit_rules = rules_from(self.vllm_config)
        end_core_with_parent()  # every core has one scheduler, which is ours

    def add_request(self, request: Any) -> None:
        """Salts the request's block hashes with its policy, then schedules it."""
        params = request.sampling_params
        if params is not None and request.resumable:
            # Of a session, to which vLLM's streaming input adds prompts: its next policy would read
            # what this one wrote, under the salt of the first.
            given = params.extra_args or {}
            own = {name: one for name, one in given.items() if not name.startswith("exit_")}
            params.extra_args = own | {"exit_mode": "off"}
        if params is not None and request.request_id not in self.requests:
            salt = joint_salt(policy_of(params, self._exit_rules), request.cache_salt)
            if salt != request.cache_salt:
                request.cache_salt = salt
                request.block_hashes.clear()
                request.update_block_hashes()
        super().add_request(request)  # type: ignore[misc]  # of the scheduler behind this


class ExitScheduler(_Salted, Scheduler):
    """vLLM's scheduler with exit policies in block hashes.

    Under data parallelism vLLM drops the table of drafts by the size of the batch, since ranks of a
    mixture of experts must draft alike; and without one it fills up steps of new requests with
    drafts that are no tokens. Ranks of other models are engines of their own, and keep it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
                drafts_from(self.vllm_config).by_batch(),
                self.vllm_config.scheduler_config.max_num_seqs,
                self.num_spec_tokens,
            )


class AsyncExitScheduler(_Salted, AsyncScheduler):
    """The same over the scheduler that plans a pass while the one before it runs, as GPUs do."""
