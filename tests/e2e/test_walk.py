"""The way of a drafted request from route to response: which files it takes, as they run.

docs/architecture.md draws the way; its boxes are files, and a plain arrow is an import.
"""

import ast
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from ..forks import WALK
from .conftest import NAME, Serve

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = 15
OF_THE_POLL = {f"exitserve/server/{name}.py" for name in ("exit_server", "metrics", "stats_window")}
"""What the server does every two seconds while anybody asks: it reads the counts of its worker."""


@pytest.fixture(scope="module")
def picture() -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Boxes (name to file), and arrows (from, kind, to)."""
    found = re.findall(r"```mermaid\n(flowchart.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1, "one picture of a request's way"
    boxes = dict(re.findall(r"(\w+)\[\"?(?:\d+\. )?([\w/]+\.py)", found[0]))
    arrows = re.findall(r"^\s*(\w+)(?:\[[^\]]*\])? (-->|-\.->)(?:\|[^|]*\|)? (\w+)", found[0], re.M)
    return boxes, arrows


@pytest.fixture(scope="module")
def walked(
    make_checkpoint: Callable[..., Path], serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> set[str]:
    """The files of ours that ran for one request, in all processes of the server."""
    folder = tmp_path_factory.mktemp("walk")
    options = ("--mode", "defer", "--exit-threshold", 0.1, "--num-drafts", 4)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(WALK, str(folder))
        with serve(make_checkpoint("llama"), *options) as server:
            body = {"model": NAME, "prompt": "def f(x):", "max_tokens": 24, "temperature": 0}
            body |= {"ignore_eos": True, "vllm_xargs": {"exit_trace": True}}
            url = f"{server.url}/v1/completions"
            assert httpx.post(url, json=body, timeout=120).status_code == 200
            time.sleep(2)  # the counts of the first request are told
            (folder / "on").touch()
            time.sleep(0.5)  # until each process has seen it
            answer = httpx.post(url, json=body, timeout=120).json()
            (folder / "on").unlink()
            time.sleep(0.5)  # the end of the server is no part of the way
    assert len(answer["choices"][0]["exit_layers"]) == 24
    files = {f"exitserve/{one.name.replace('+', '/')}" for one in folder.glob("*.py")}
    return files - OF_THE_POLL


def test_a_drafted_request_takes_few_files(walked: set[str]) -> None:
    assert len(walked) <= MOST_FILES, "\n".join(sorted(walked))


def test_the_picture_shows_files_that_run(walked: set[str], picture) -> None:
    boxes, _ = picture
    assert set(boxes.values()) <= walked


def test_arrows_are_imports(picture) -> None:
    boxes, arrows = picture
    assert {box for start, _, end in arrows for box in (start, end)} == set(boxes)
    wrong = [
        f"{boxes[start]} does not import {boxes[end]}"
        for start, kind, end in arrows
        if kind == "-->"
        and boxes[end].removesuffix(".py").replace("/", ".") not in imports(boxes[start])
    ]
    assert wrong == []


def imports(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found
