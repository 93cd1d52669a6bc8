"""The version is that of the newest git tag, and one without a repository is marked as such."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exitserve

ROOT = Path(__file__).parents[2]
PRETEND = "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_EXITSERVE"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with this project's configuration, and no repository yet."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def version_of(checkout: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "setuptools_scm"]
    environ = {key: value for key, value in os.environ.items() if "PRETEND_VERSION" not in key}
    done = subprocess.run(
        command, cwd=checkout, env=environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(checkout: Path, tag: str | None = None) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    commands = [["init", "--quiet"], ["add", "--all"], ["commit", "-qm", "x", "--allow-empty"]]
    for command in [*commands, *([["tag", tag]] if tag else [])]:
        subprocess.run([*git, *command], cwd=checkout, check=True, capture_output=True)


def test_a_tag_is_the_version(checkout: Path) -> None:
    commit(checkout, tag="v0.2.0")
    assert version_of(checkout) == "0.2.0"


def test_an_archive_has_the_fallback_unless_told(checkout: Path) -> None:
    assert version_of(checkout) == "0.1.0.dev0"
    assert version_of(checkout, **{PRETEND: ""}) == "0.1.0.dev0"  # a build argument not given
    assert version_of(checkout, **{PRETEND: "0.3.1"}) == "0.3.1"


def test_the_package_says_the_version_of_its_installation() -> None:
    assert exitserve.__version__ == importlib.metadata.version("exitserve")
