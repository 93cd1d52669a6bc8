"""A server on loopback as a child process: for `eval` and tests."""

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
    """An unused TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the leader of a process group; kills the group if that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalServer:
    """`exitserve serve MODEL ...` on loopback; it runs inside the `with` block."""

    def __init__(self, model: Path | str, *options: str, log: Path) -> None:
        """Prepares the command; the server starts in `with`.

        Args:
            model: the checkpoint.
            options: further flags of `exitserve serve`.
            log: file for the server's output.
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
        """Starts the server and waits until it is healthy.

        Raises:
            ExitServeError: it exited, or was not healthy in time; the message ends with its log.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._launch()
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
        """Stops the server, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            stop(process)

    def wait(self, seconds: float) -> int:
        """The exit code of a server that ends by itself.

        Raises:
            subprocess.TimeoutExpired: it did not in so many seconds.
        """
        assert self._process is not None, "the server is not running"
        return self._process.wait(seconds)

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as output:
            # A new process group, so that stopping reaches the engine's processes too. Not a new
            # session: Linux may then keep a client on the same core waiting until it is idle.
            return subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
