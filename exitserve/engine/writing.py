"""Text that a model writes: plain vLLM in a process of its own.

What vLLM sets in its process (environment, compiler, threads) stays there, and when the process is
gone all of the device's memory is free again. It ends with the process that started it, however
that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from exitserve.errors import ExitServeError

COMPILE_FROM = 2000
"""Texts to write, from which on compiling (a minute) is worth it."""
_END_SECONDS = 30.0
_TAIL = 2000
"""Characters of its log to show."""
_OF_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which a process of a distributed run finds the others."""


@dataclass(frozen=True)
class Written:
    """What came of a request."""

    number: int
    """Of the request."""
    tokens: list[int]
    """Without the one that ended it."""
    has_ended: bool
    """By a token that ends it, not at the limit."""


class Writer:
    """Writes what it is asked for, as much at once as the device takes; runs in a `with` block."""

    def __init__(self, model: str, *, length: int, count: int, seed: int) -> None:
        """Says what will be written; the process starts in `with`.

        Args:
            model: directory or hub id; it runs at full depth.
            length: of the longest text, prompt included, in tokens.
            count: about how many texts.
            seed: of what is sampled.
        """
        self._model = model
        self.waiting = 0
        """How many requests have no answer yet."""
        options = {
            "max_model_len": length,
            "seed": seed,
            "enforce_eager": count < COMPILE_FROM,
            "skip_tokenizer_init": True,
        }
        context = multiprocessing.get_context("spawn")
        self._scratch = tempfile.TemporaryDirectory(prefix="exitserve-")
        self._log = Path(self._scratch.name) / "log"
        self._connection, self._theirs = context.Pipe()
        work = (self._theirs, model, options, self._log)
        self._process = context.Process(target=_work, args=work, daemon=True)

    def __enter__(self) -> Writer:
        self._process.start()
        # With this copy open, the end of the process would go unnoticed.
        self._theirs.close()
        self.rows: int = self._received()
        """How many texts are written at once; more that wait keep the device busy."""
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._scratch.cleanup()

    def ask(self, number: int, prompt: Sequence[int], **sampling: Any) -> None:
        """Asks for the continuation of some token ids, by fields of vLLM's `SamplingParams`."""
        self.waiting += 1
        try:
            self._connection.send((number, list(prompt), sampling))
        except OSError as error:
            raise self._ended() from error

    def take(self) -> list[Written]:
        """Waits until something is written; returns all that is new."""
        assert self.waiting, "nothing was asked for"
        written: list[Written] = self._received()
        self.waiting -= len(written)
        return written

    def _received(self) -> Any:
        try:
            received = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(received, str):
            raise ExitServeError(f"vLLM cannot write text with '{self._model}': {received}")
        return received

    def _ended(self) -> ExitServeError:
        self._process.join(_END_SECONDS)
        said = self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        return ExitServeError(
            f"vLLM ended (exit code {self._process.exitcode}) while it wrote text with "
            f"'{self._model}'; its log ends:\n{said}"
        )


def _work(connection: Connection, model: str, options: Mapping[str, Any], log: Path) -> None:
    """The process: takes requests and sends what is written, until nobody listens any more."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other side, and so this one
    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The engine too runs in this process, so that none outlives it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from exitserve.engine.launch import prepare_environment, start_plain_engine

        prepare_environment()
        engine = start_plain_engine(model, **options).llm_engine
        connection.send(engine.vllm_config.scheduler_config.max_num_seqs)
        _write(engine, connection)
    except Exception as error:
        with suppress(OSError):
            connection.send(" ".join(str(error).split()) or repr(error))
        raise


def _write(engine: Any, connection: Connection) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        while not (engine.has_unfinished_requests() and requests.empty()):
            request = requests.get()
            if request is None:
                return
            number, prompt, sampling = request
            params = SamplingParams(
                **sampling, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        if outputs := engine.step():
            connection.send([_written(output) for output in outputs])


def _receive(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Reads in a thread of its own: neither side may wait for the other to read. None: the end."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv())
    requests.put(None)


def _written(output: Any) -> Written:
    text = output.outputs[0]
    ended = text.finish_reason == "stop"
    tokens = list(text.token_ids)
    return Written(int(output.request_id), tokens[:-1] if ended else tokens, ended)
