"""Where a checkpoint comes from: command line, versions, revision, resolved recipe."""

import json
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exitserve.reporting.report import versions
from exitserve_training.recipe import Recipe

FILE = "training_run.json"
_PACKAGES = (
    "exitserve",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
)


def training_run(recipe: Recipe) -> dict[str, Any]:
    """Describes this run: enough to repeat it, without any path of this machine."""
    return {
        "schema_version": 1,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(_PACKAGES),
        "recipe": recipe.model_dump(mode="json"),
    }


def write_training_run(output_dir: Path, run: dict[str, Any]) -> None:
    """Writes the description beside the checkpoint; earlier sessions of the run are kept."""
    earlier = read_training_run(output_dir)
    sessions = [*earlier.pop("earlier_sessions", []), earlier] if earlier else []
    text = json.dumps({**run, "earlier_sessions": sessions}, indent=2) + "\n"
    (output_dir / FILE).write_text(text, encoding="utf-8")


def read_training_run(output_dir: Path) -> dict[str, Any]:
    """The description of the newest session, or an empty one where there is none."""
    path = output_dir / FILE
    if not path.is_file():
        return {}
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return run


def _git_revision() -> str | None:
    """The revision of the code that trains, marked `-dirty` where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
