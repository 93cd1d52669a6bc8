"""Whether a server's engine ended with the server, or failed under it.

When its engine fails, vLLM 0.32 stops the server as if it had been asked to, with exit code 0: a
supervisor that restarts on failure would leave it down.
"""

from typing import Any


class EngineEnd:
    """How the engine of a server ended."""

    def __init__(self) -> None:
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
