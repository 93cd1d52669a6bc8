"""Files that others read: replaced at once, linked rather than copied, checked beforehand."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exitserve.errors import ExitServeError


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file at once: whatever goes wrong, the old one or the new one is there, whole.

    Where `path` is a link, as in the cache of a model hub, the link becomes a file, and what it
    pointed to stays as it is.
    """
    mode = path.stat().st_mode if path.exists() else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode & 0o777)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Else a later replacement may survive a power failure that this one does not.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_writable(folder: Path) -> bool:
    """Whether files can be made in an existing folder, found out by making one."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable."):
            return True
    except OSError:
        return False


def check_writable(folder: Path, fix: str) -> None:
    """Raises `ExitServeError`, which ends with `fix`, unless files can be made in a folder."""
    if not is_writable(folder):
        raise ExitServeError(f"'{folder}' cannot be written to; {fix}.")


def link_files(source: Path, target: Path, but: Collection[str]) -> None:
    """Puts links to the files and folders of `source` into `target`, and copies where it cannot:
    all but those that are hidden, and the names in `but`."""
    for path in sorted(source.iterdir()):
        if path.name in but or path.name.startswith("."):
            continue
        try:
            (target / path.name).symlink_to(path.absolute())
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, target / path.name)


def copy_files(source: Path, target: Path, paths: Iterable[Path]) -> None:
    """Copies files into another folder, by their paths relative to both."""
    for path in paths:
        (target / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / path, target / path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill beside `out`, which it becomes at the end, or, where anything fails, goes.

    Raises:
        ExitServeError: see `check_new_folder`, or nothing can be written there.
    """
    check_new_folder(out)
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.replace(out)
    except OSError as error:
        raise ExitServeError(f"cannot write '{out}': {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new_folder(out: Path) -> None:
    """Raises `ExitServeError` if a checkpoint cannot be written there."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ExitServeError(f"--out '{out}' exists; give another, or remove it.")
