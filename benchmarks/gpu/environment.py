"""Makes vLLM and this checkout importable, and says what machine this is.

Nothing here needs more than Python's own library, so that it can run first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
UNPACK = ROOT / ".gpu" / "part-00" / "unpack.sh"
"""Of a vLLM that was packed for a machine without a network; see README.md."""
METADATA = "EXITSERVE_GPU_METADATA"
"""In the environment of the script's second start: the folder with this checkout's metadata."""
PLUGIN = "exitserve_if_nodes"
"""vLLM's name for `if_nodes.install`, which it calls in each of its processes if it is named."""


def is_ready() -> bool:
    """Whether this is the second start."""
    return METADATA in os.environ


def start_again(arguments: list[str]) -> NoReturn:
    """Becomes the script once more, with vLLM and this checkout on the path.

    A vLLM that can be imported is left alone; else a packed one is unpacked, where there is one.

    Args:
        arguments: the script and its own arguments.
    """
    folder = tempfile.mkdtemp(prefix="exitserve-metadata-")
    write_metadata(Path(folder))
    given = os.environ.get("PYTHONPATH")
    own = (ROOT, ROOT / "kernels", ROOT / "training", Path(__file__).parent)
    paths = [*map(str, own), folder]
    environment = os.environ | {
        METADATA: folder,
        "PYTHONPATH": os.pathsep.join(paths + ([given] if given else [])),
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, *arguments]
    if find_spec("vllm") is None and UNPACK.is_file():
        # It sets variables, so it must run in the shell that becomes the script.
        lines = '. "$0" || echo "unpacking vLLM failed" >&2; exec "$@"'
        command = ["bash", "-c", lines, str(UNPACK), *command]
    os.execvpe(command[0], command, environment)


def clean_up() -> None:
    """Removes what the first start left."""
    shutil.rmtree(os.environ[METADATA], ignore_errors=True)


def write_metadata(folder: Path) -> Path:
    """What an installation of this checkout would say of itself: its name and entry points, and
    that of `if_nodes`.

    vLLM finds plugins by entry points, in each of its processes. An installed exitserve may be
    another checkout; what comes first on the path counts.

    Args:
        folder: to be put on the path; gets one directory.

    Returns:
        That directory.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], "0.0.0"  # the real one is in git's tags, if they are here
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    points = {"console_scripts": project["scripts"], **project["entry-points"]}
    points["vllm.general_plugins"][PLUGIN] = "if_nodes:install"
    lines = []
    for group, own in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in own.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return info


def card() -> dict[str, Any] | None:
    """The first GPU: `name`, `driver`, `memory_bytes`; None without one.

    Asked of nvidia-smi: a process that asks CUDA itself takes memory on the card.
    """
    asked = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = found.splitlines()
    if not lines:
        return None
    name, driver, mebibytes = (part.strip() for part in lines[0].split(","))
    return {"name": name, "driver": driver, "memory_bytes": int(mebibytes) << 20}


def facts() -> dict[str, Any]:
    """Where and with what: `date`, `commit`, `card`, `cuda`, `machine`, `versions`."""
    from exitserve.reporting.report import machine, versions

    where, gpu = machine(), card()  # without torch, so it does not ask CUDA either
    if gpu is not None:
        where["gpus"] = [gpu["name"]]
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "card": gpu,
        "cuda": torch.version.cuda,
        "machine": where,
        "versions": versions(),
    }


def _commit() -> str | None:
    """Of this checkout; None where it came without its history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
