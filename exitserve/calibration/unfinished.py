"""What an interrupted calibration has found, for the next run of the same command.

A file beside the report holds each slow result as it is found: what the model wrote, the
reading of each piece, the outcome of each choice. It is removed once the report is written.
Tensors are loaded as weights only, so a file that came with somebody's checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from exitserve.errors import ExitServeError

FILE = "unfinished.sqlite"


class Recall(Protocol):
    """Gives a result by its name, or computes it."""

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """`compute` gives tensors, numbers and strings, in lists, tuples and dicts."""


def anew(name: str, compute: Callable[[], Any]) -> Any:
    """A `Recall` that remembers nothing."""
    return compute()


class UnfinishedWork:
    """Results of one calibration, in a file of their own."""

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """Opens what an earlier run left behind; of another calibration, it is dropped.

        Raises:
            ExitServeError: the file cannot be written or read.
        """
        self.path = folder / FILE
        self._job = hashlib.sha256(
            json.dumps(job, sort_keys=True, default=str).encode()
        ).hexdigest()
        with self._told():
            self._database = sqlite3.connect(self.path, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute("CREATE TABLE IF NOT EXISTS found (job, name, value)")
            self._database.execute("CREATE INDEX IF NOT EXISTS by_name ON found (job, name)")
            self._database.execute("DELETE FROM found WHERE job != ?", (self._job,))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Says in one line what is wrong with the file, or with the disk."""
        try:
            yield
        except (sqlite3.Error, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ExitServeError(
                f"'{self.path}' cannot be used ({error}); remove it, or give another --out."
            ) from error

    def __len__(self) -> int:
        return int(self._database.execute("SELECT COUNT(*) FROM found").fetchone()[0])

    def recall(self, name: str, compute: Callable[[], Any]) -> Any:
        """See `Recall`."""
        with self._told():
            query = "SELECT value FROM found WHERE job = ? AND name = ?"
            row = self._database.execute(query, (self._job, name)).fetchone()
            if row is not None:
                return torch.load(io.BytesIO(row[0]), weights_only=True)
        value, written = compute(), io.BytesIO()
        torch.save(value, written)
        with self._told():
            self._database.execute(
                "INSERT INTO found VALUES (?, ?, ?)", (self._job, name, written.getvalue())
            )
        return value

    def finish(self) -> None:
        """Removes the file: all is in the report."""
        self._database.close()
        self.path.unlink(missing_ok=True)
