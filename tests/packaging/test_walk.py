"""A request's way through the code, as docs/architecture.md draws it, against the imports.

The picture is a mermaid flowchart whose boxes are files. A plain arrow is an import, in the
direction of the arrow; a dotted one is a hand-over, such as vLLM's, that imports do not show.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = 12


def _picture() -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Boxes (name to file), and arrows (from, kind, to)."""
    found = re.findall(r"```mermaid\n(flowchart.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1, "one picture of a request's way"
    boxes = dict(re.findall(r"(\w+)\[\"?(?:\d+\. )?([\w/]+\.py)", found[0]))
    arrows = re.findall(r"^\s*(\w+)(?:\[[^\]]*\])? (-->|-\.->)(?:\|[^|]*\|)? (\w+)", found[0], re.M)
    return boxes, arrows


def _module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts)


def _imports(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_a_request_passes_at_most_twelve_files() -> None:
    boxes, _ = _picture()
    files = list(boxes.values())
    assert len(files) == len(set(files)) <= MOST_FILES
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_arrows_are_imports() -> None:
    boxes, arrows = _picture()
    assert {box for start, _, end in arrows for box in (start, end)} == set(boxes)
    wrong = [
        f"{boxes[start]} does not import {boxes[end]}"
        for start, kind, end in arrows
        if kind == "-->" and _module(boxes[end]) not in _imports(boxes[start])
    ]
    assert wrong == []


def test_the_way_is_one_piece() -> None:
    """From the first box every other can be reached."""
    boxes, arrows = _picture()
    first, *_ = boxes
    reached, border = {first}, [first]
    while border:
        at = border.pop()
        for start, _, end in arrows:
            if start == at and end not in reached:
                reached.add(end)
                border.append(end)
    assert reached == set(boxes)
