"""Runs what the documentation tells readers to run, as written."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from .forks import PythonProcess

ROOT = Path(__file__).parent.parent
COMMAND = ".venv/bin/exitserve "


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def statements(block: str) -> list[str]:
    """A block of shell commands in pieces: each `exitserve` command by itself, all else whole."""
    joined = block.replace("\\\n", " ")
    ours = rf"^{re.escape(COMMAND)}.*$"
    return [part for part in re.split(rf"({ours})", joined, flags=re.MULTILINE) if part.strip()]


class Checkout:
    """A folder with what the repository's has, and room for what commands write."""

    def __init__(self, folder: Path) -> None:
        """Links to the repository's folders; `runs` is the checkout's own."""
        self.folder = folder
        for entry in ROOT.iterdir():
            if entry.name not in ("runs", "build") and not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)

    def start(self, command: str) -> PythonProcess:
        """Starts an `exitserve` command as a fork; its output goes to `output`."""
        words = shlex.split(command)[1:]
        return PythonProcess(
            "exitserve", words, self.folder / "output", os.environ, folder=self.folder
        )

    @property
    def output(self) -> str:
        """What the last `exitserve` command printed."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def run(self, block: str) -> str:
        """Runs a block of shell commands; returns what the last of them printed."""
        printed = ""
        for part in statements(block):
            if part.startswith(COMMAND):
                code, printed = self.start(part).wait(600), self.output
            else:
                script = ["bash", "-euo", "pipefail", "-c", part]
                done = subprocess.run(script, cwd=self.folder, capture_output=True, text=True)
                code, printed = done.returncode, done.stdout
                printed += done.stderr if code else ""
            assert code == 0, f"{part}\n{printed[-3000:]}"
        return printed
