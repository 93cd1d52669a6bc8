"""Processes for tests that need not import torch and vLLM again, which takes ten seconds of a core.

They are forks of a process that has imported both and done nothing else: Python's own fork server
(`multiprocessing.forkserver`). All else is as if they had been started anew: each has its own
arguments, environment, output and process group, and can be killed.
"""

import atexit
import contextlib
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import setproctitle

START_SECONDS, STOP_SECONDS = 300.0, 30.0
"""Of a server, at most."""
MODULES = (
    "exitserve.engine.architectures.decoders",
    "exitserve.engine.launch",
    "exitserve.server.routes",
    "transformers.models.auto.modeling_auto",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What a fork has imported. Importing starts no thread: the threads of libgomp, for one, would be
missing in a fork.
"""

FORK = "__fork__"
"""Name of this file in a fork, which runs it by its path: the checkout's folders stay out of the
way to packages.
"""


WALK = "EXITSERVE_TESTS_WALK"
"""Environment variable: the folder in which a fork notes which of our files run."""


class PythonProcess:
    """`python -m MODULE ARGUMENTS`, with what `subprocess.Popen` offers to those who wait."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Starts it, as the leader of a process group.

        Args:
            module: what to run.
            arguments: of the module.
            log: file for its output.
            environment: all of its environment variables.
            errors: file for its errors, if they are not to be in `log`.
            folder: its working directory, if it is not that of the tests.
        """
        fork = multiprocessing.get_context("forkserver").Process
        outputs = (log, errors or log)
        work = ("_run", module, arguments, outputs, dict(environment), folder or Path.cwd())
        self._process = fork(target=runpy.run_path, args=(__file__, {"WORK": work}, FORK))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def free_port() -> int:
    """An unused TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: Any) -> None:
    """Terminates the leader of a process group; kills the group if that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(url: str) -> bool:
    """Whether a server answers there."""
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


class LocalServer:
    """`exitserve serve MODEL ...` on loopback; it runs inside the `with` block."""

    def __init__(self, model: Path | str, *options: str, log: Path) -> None:
        """Prepares the command, whose output goes to `log`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        own = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._arguments = ["serve", str(model), *own, *options]
        self._process: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Starts the server and waits until it is healthy."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._launch()
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"the server did not start; its log ends:\n{end}")
            time.sleep(0.25)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the server, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            stop(process)

    def wait(self, seconds: float) -> int:
        """The exit code of a server that ends by itself; or `subprocess.TimeoutExpired`."""
        return int(self._process.wait(seconds))

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def _launch(self) -> Any:
        with self.log.open("wb") as output:
            # A new process group, so that stopping reaches the engine's processes too. Not a new
            # session: Linux may then keep a client on the same core waiting until it is idle.
            return subprocess.Popen(
                [sys.executable, "-m", "exitserve", *self._arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )


class ForkedServer(LocalServer):
    """The same as a fork."""

    def _launch(self) -> Any:
        return PythonProcess("exitserve", self._arguments, self.log, os.environ)


def fork_instead_of_spawn() -> None:
    """From now on, what this process starts with `spawn`, as vLLM does on CPUs, is a fork too."""
    multiprocessing.forkserver.set_forkserver_preload(list(MODULES))
    multiprocessing.context.SpawnProcess._Popen = _Popen


class _Popen(multiprocessing.popen_forkserver.Popen):
    """Gives the fork this process's environment, output and group, and not the fork server's."""

    def _launch(self, process: Any) -> None:
        work = ("_call", dict(os.environ), os.getpgid(0), process._target, process._kwargs)
        process._target, process._kwargs = runpy.run_path, {}
        process._args = (__file__, {"WORK": (*work, *process._args)}, FORK)
        self._fds = [1, 2]
        super()._launch(process)


def _call(
    environment: Mapping[str, str],
    group: int,
    target: Callable[..., None],
    options: Mapping[str, Any],
    *arguments: Any,
) -> None:
    _begin(environment, group)
    for place, inherited in zip(
        (1, 2), multiprocessing.forkserver.get_inherited_fds(), strict=False
    ):
        os.dup2(inherited, place)
    target(*arguments, **options)


def _run(
    module: str,
    arguments: Sequence[str],
    outputs: tuple[Path, Path],
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    _begin(environment, group=0)
    os.chdir(folder)
    for file in outputs:
        file.unlink(missing_ok=True)
    for place, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), place)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _begin(environment: Mapping[str, str], group: int) -> None:
    os.setpgid(0, group)
    setproctitle.getproctitle()  # it looks for its place in memory beside the first environment
    os.environ.clear()
    os.environ.update(environment)
    # Processes of its own are forks of the same fork server, which is not started again.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    fork_instead_of_spawn()
    if WALK in environment:
        _note_files(Path(environment[WALK]))


def _note_files(folder: Path) -> None:
    """From now on, notes which of our files run while there is a file `on`: one file for each."""
    is_on = False

    def watch() -> None:
        nonlocal is_on
        while True:
            is_on = (folder / "on").exists()
            time.sleep(0.1)

    def note(frame: Any, _event: str, _argument: object) -> None:
        if is_on and "/exitserve/" in (file := frame.f_code.co_filename):
            (folder / file.rpartition("/exitserve/")[2].replace("/", "+")).touch()

    threading.Thread(target=watch, daemon=True).start()
    threading.settrace(note)
    sys.settrace(note)


if __name__ == FORK:
    name, *given = globals()["WORK"]
    globals()[name](*given)
