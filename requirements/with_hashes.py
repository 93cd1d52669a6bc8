"""Writes `cpu-hashes.txt`: what `cpu.txt` pins, with the hash of each file that the image takes.

Run on x86-64 Linux with Python 3.11, as in the image:  python requirements/with_hashes.py

torch is left out: its CPU builds lie on an index of PyTorch's own (or wherever PIP_EXTRA_INDEX_URL
says), so there is no one file whose hash could be asked for. So is what only tests use: what drives
a browser, the schemas of Kubernetes and 4-bit maps, 310 MB in all, and LangChain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HEAD = "# requirements/cpu.txt for the image. Made by requirements/with_hashes.py.\n"
LEFT_OUT = (
    *("torch", "playwright", "greenlet", "pyee", "axe-playwright-python"),
    *("kubernetes-validate", "importlib_resources"),
    *("langchain-openai", "langchain-core", "langchain-protocol", "langsmith", "jsonpatch"),
    *("jsonpointer", "orjson", "requests-toolbelt", "uuid_utils", "zstandard"),
)


def locked(report: dict[str, Any]) -> str:
    """The lines of a requirements file for what pip's report would install."""
    lines = []
    for one in report["install"]:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
        if name not in LEFT_OUT:
            lines.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return HEAD + "".join(sorted(lines, key=str.lower))


def main() -> None:
    """Asks pip, which downloads little more than metadata for that."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", "-r", str(FOLDER / "cpu.txt")]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    (FOLDER / "cpu-hashes.txt").write_text(locked(report))


if __name__ == "__main__":
    main()
