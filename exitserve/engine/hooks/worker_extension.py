"""What the API process may ask of the worker, through vLLM's `collective_rpc`."""

from typing import Any

from exitserve.engine.compat.config import check_version
from exitserve.engine.compat.runner import watch_ends
from exitserve.engine.compat.seeds import seed_keeper
from exitserve.engine.early_exit.batch import HostRequests
from exitserve.engine.early_exit.device.batch import DeviceRequests
from exitserve.engine.state import EngineState
from exitserve_kernels.dispatch import chosen


def _refuse_weights(*_args: Any, **_more: Any) -> None:
    """In place of the runner's `reload_weights`: copies of weights would stay as they are, those of
    the exit rows, and those that make keys and values above exits."""
    raise RuntimeError(
        "exitserve does not support new weights in a running engine: exits keep copies of the old "
        "ones. Start the engine again, from the new checkpoint."
    )


class ExitWorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any

    _is_attached = False

    def exit_attach(self) -> None:
        """Tells our requests what vLLM's runner knows of them, at the first call after start-up.

        Each API process calls it, and none knows whether it is the first.
        """
        if self._is_attached:
            return
        self._is_attached = True
        check_version()
        requests, runner = self._exit_state.requests, self.model_runner
        if self._exit_state.rules.exit_layers:
            runner.reload_weights = _refuse_weights
        if isinstance(requests, DeviceRequests):
            watch_ends(runner, requests.preempted.forget)
        elif isinstance(requests, HostRequests):
            requests.request_ids = lambda: list(runner.input_batch.req_ids)
            requests.preempted.may_return = lambda name: name in runner.requests
            requests.keep_seeds = seed_keeper(runner)

    def exit_stats(self) -> dict[str, Any]:
        """Counts since start."""
        return self._counted().recorder.snapshot()

    def exit_kernels(self) -> dict[str, str]:
        """The form, triton or torch, in which each operation runs; see `dispatch.chosen`."""
        return dict(chosen())

    def exit_take_traces(self, key: str) -> dict[str, dict[int, tuple[int, str]]]:
        """See `Recorder.take_traces`."""
        return self._counted().recorder.take_traces(key)

    @property
    def _exit_state(self) -> EngineState:
        """The model's. The config's name changes once a server is up, where core and worker share
        it (`_perform_handshakes` in `vllm/v1/engine/core.py`), so it leads to another state then.
        """
        state: EngineState = self.model_runner.get_model().exit_state
        return state

    def _counted(self) -> EngineState:
        """The engine's state, its counts and traces up to date."""
        state = self._exit_state
        if state.requests is not None:
            state.requests.update_counts()
        return state
