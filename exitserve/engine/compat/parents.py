"""An engine core ends with the process that started it.

vLLM 0.32 ends its engine core in an orderly shutdown only: were the server killed outright
(SIGKILL, out of memory), it would go on holding memory and cores. Workers need nothing: vLLM's
own watch ends them with the core (`vllm/v1/executor/multiproc_executor.py`, DeathPipeMonitor).
"""

import multiprocessing
import os
import signal
import threading
import time

GRACE = 5.0
"""Seconds that a core has to end by itself, once its parent is gone."""
CORE = "EngineCore"
"""How vLLM's names of its core processes begin (`vllm/v1/engine/utils.py`)."""


def end_core_with_parent() -> None:
    """Ends this process soon after its parent; does nothing where it is no core of vLLM's.

    An engine may also run in the process of whoever started it, which is theirs to end.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(CORE):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="exitserve end with parent", daemon=True).start()
