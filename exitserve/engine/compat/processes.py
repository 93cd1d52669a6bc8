"""vLLM's processes: where their frames lie, and when they end."""

import multiprocessing
import os
import signal
import threading
import time

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

ROOM = 1 << 16
"""Words that a loop's frame asks for; what no frame uses never becomes memory."""


def make_room() -> None:
    """Gives the frames above a core's or a worker's loop room in one chunk of CPython's stack.

    A chunk has 16 KiB. In Python 3.11, 3.12 and early 3.13 a call beyond its end maps memory, and
    its return unmaps it (gh-142183). Where all layers make such calls, passes of a small model take
    up to 44 % longer. A frame that needs much gets a larger chunk.
    """
    for loop in (EngineCoreProc.run_busy_loop, WorkerProc.worker_busy_loop):
        loop.__code__ = loop.__code__.replace(co_stacksize=ROOM)


def end_core_with_parent() -> None:
    """Ends this process, if vLLM's name for it says that it is a core, soon after its parent.

    vLLM 0.32 ends its core in an orderly shutdown only: were the server killed outright (SIGKILL,
    out of memory), it would go on holding memory and cores. Workers end with their core, by vLLM's
    own watch. An engine may also run in the process of whoever started it, which is theirs to end.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)  # in which it may end by itself
        os._exit(1)

    threading.Thread(target=watch, name="exitserve end with parent", daemon=True).start()
