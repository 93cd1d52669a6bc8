"""A server of our own on loopback, as a child process: for the demo and for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from exitserve.errors import ExitServeError

START_SECONDS = 300.0
STOP_SECONDS = 30.0


def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the leader of a process group to stop; ends the whole group if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalServer:
    """`exitserve serve MODEL ...` on loopback; ready inside the `with` block, gone after it."""

    def __init__(self, model: Path | str, *options: str, log: Path) -> None:
        """Prepares the command; nothing starts before `with`.

        Args:
            model: the checkpoint.
            options: further flags of `exitserve serve`.
            log: file that gets the server's output.
        """
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            *(sys.executable, "-m", "exitserve", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            ExitServeError: it stopped, or did not answer in time; the message ends with its log.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            # A process group of its own, so that stopping reaches the engine's processes too. No
            # session: with one, Linux may let a client on the same core wait until it is idle.
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ExitServeError(f"the server did not start; its log ends:\n{self._tail()}")
            time.sleep(0.25)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks the server to stop, and makes sure that it did."""
        process, self._process = self._process, None
        if process is not None:
            stop(process)

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
