"""The end of a server whose engine is still starting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.engine.utils


def stop_while_starting() -> None:
    """Lets SIGTERM end a server that starts: vLLM's `zmq_socket_ctx` swallows the interrupt, and
    the server waits for ten minutes for an engine that it has stopped listening to."""
    utils: Any = vllm.v1.engine.utils
    swallowing = utils.zmq_socket_ctx

    @contextmanager
    def interruptible(*args: Any, **options: Any) -> Iterator[Any]:
        with swallowing(*args, **options) as socket:
            yield socket
            return
        raise KeyboardInterrupt

    utils.zmq_socket_ctx = interruptible
