"""How a server and its engine end together: while they start, when they are told to, in a failure.

When its engine fails, vLLM 0.32 stops the server as if it had been asked to, with exit code 0: a
supervisor that restarts on failure would leave it down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def stop_while_starting() -> None:
    """Lets SIGTERM end a server that starts: vLLM's `zmq_socket_ctx` swallows the interrupt, and
    the server waits for ten minutes for an engine that it has stopped listening to."""
    utils: Any = import_module("vllm.v1.engine.utils")
    swallowing = utils.zmq_socket_ctx

    @contextmanager
    def interruptible(*args: Any, **options: Any) -> Iterator[Any]:
        with swallowing(*args, **options) as socket:
            yield socket
            return
        raise KeyboardInterrupt

    utils.zmq_socket_ctx = interruptible


class EngineEnd:
    """How the engine of a server ended."""

    def __init__(self) -> None:
        """Knows nothing before `watch`."""
        self.failed = False
        """Whether it had ended before the server told it to."""
        self._told_to_stop = False

    def watch(self, engine_client: Any) -> None:
        """Follows an engine through vLLM's client.

        The server calls the client's `shutdown` when it is told to stop, and always at its end.
        Only at the first call does an engine that has ended mean that it failed.
        """
        shutdown = engine_client.shutdown

        def noted(*args: Any, **options: Any) -> None:
            if not self._told_to_stop:
                self.failed = bool(engine_client.errored)
            self._told_to_stop = True
            shutdown(*args, **options)

        engine_client.shutdown = noted
