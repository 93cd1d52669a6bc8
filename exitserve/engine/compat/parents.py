"""Processes of an engine end with the process that started them.

vLLM 0.32 ends its engine core and its workers in an orderly shutdown only. Were the server killed
outright (SIGKILL, out of memory), they would go on holding memory and cores for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

GRACE = 5.0
"""Seconds that a process has to end by itself, once its parent is gone."""


def end_with_parent() -> None:
    """Ends this process soon after its parent; does nothing in a process without one of vLLM's."""
    parent = multiprocessing.parent_process()
    if parent is None or any(one.name == _NAME for one in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name=_NAME, daemon=True).start()


_NAME = "exitserve end with parent"
