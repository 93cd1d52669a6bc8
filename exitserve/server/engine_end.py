"""How a server ends: whether its engine ended with it, or failed under it, and what comes late.

When its engine fails, vLLM 0.32 stops the server as if it had been asked to, with exit code 0: a
supervisor that restarts on failure would leave it down. And a server that finishes what runs goes
on accepting requests, which its engine answers at once with an empty text: a router that goes by
the number of open requests would send it all that come.
"""

import asyncio
import threading
import time
from typing import Any

DOOR_EMPTIES_S = 1.0
"""From the last request that is let in until its engine has it: long enough to tokenize it."""


class EngineEnd:
    """How the engine of a server ended."""

    def __init__(self) -> None:
        self.failed = False
        """Whether it had ended before the server told it to."""
        self._told_to_stop = False

    def watch(self, engine_client: Any, state: Any) -> None:
        """Follows an engine through vLLM's client.

        The server calls the client's `shutdown` when it is told to stop, and always at its end.
        Only at the first call does an engine that has ended mean that it failed.

        Args:
            engine_client: vLLM's.
            state: of the app, which turns away all that comes from then on.
        """
        shutdown, loop = engine_client.shutdown, asyncio.get_running_loop()
        loops_thread = threading.get_ident()

        def noted(*args: Any, **options: Any) -> None:
            if not self._told_to_stop:
                self._told_to_stop = True
                self.failed = bool(engine_client.errored)
                loop.call_soon_threadsafe(_turn_away, state)
                # vLLM calls from a thread of its own, so that the server goes on.
                if not self.failed and threading.get_ident() != loops_thread:
                    time.sleep(DOOR_EMPTIES_S)
            shutdown(*args, **options)

        engine_client.shutdown = noted


def _turn_away(state: Any) -> None:
    """Takes no more connections, nor requests on those there are (`front_door.FrontDoor`)."""
    state.exitserve.stops = True
    # None where several API processes share one: it stays open until the last ends.
    for listener in getattr(getattr(state, "server", None), "servers", ()):
        listener.close()
