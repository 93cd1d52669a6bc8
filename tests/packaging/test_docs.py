"""The documentation: line lengths, links, the index, and commands that exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from exitserve.cli import build_parser

ROOT = Path(__file__).parents[2]
WIDTH = 100
README_LINES = 130
FENCE = re.compile(r"^\s*(```|~~~)")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^()\s]+)\)")
WRITTEN_BY_PROGRAMS = ("models/exit-py-19m/report.md",)


@cache
def pages() -> tuple[str, ...]:
    """Every Markdown page that git knows, or that it would after `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = [name for name in listed.splitlines() if (ROOT / name).is_file()]
    return tuple(name for name in found if name not in WRITTEN_BY_PROGRAMS)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without code, tables, comments and front matter."""
    fenced = front = False
    previous = ""
    for number, line in enumerate(text.splitlines(), 1):
        if number == 1 and line == "---":
            front = True
        elif front:
            front = line != "---"
        elif FENCE.match(line):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "<!--")):
            # Indented code follows an empty line or more of it; the lines of a list item do not.
            may_be_code = not previous or previous.startswith("    ")
            if not may_be_code or not line.startswith("    "):
                yield number, line
        previous = line


def too_long(text: str) -> list[int]:
    """Numbers of the lines over the width; what a link points to does not count."""
    return [n for n, line in prose(text) if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH]


def anchors(text: str) -> set[str]:
    """What a link may name after `#`, made of headings as GitHub makes it."""
    found: set[str] = set()
    for _, line in prose(text):
        if heading := re.match(r"#{1,6} +(.*)", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
            copies = [slug, *(f"{slug}-{n}" for n in range(1, 9))]
            found.add(next(one for one in copies if one not in found))
    return found


def broken_links(page: str, text: str) -> list[str]:
    """Links to files that are not there, and to headings that their page does not have."""
    tables = (line for line in text.splitlines() if line.startswith("|"))
    whole = "\n".join([*(line for _, line in prose(text)), *tables])
    problems = []
    for target in LINK.findall(re.sub(r"`[^`]*`", "", whole)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not file.exists():
            problems.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if not name else file.read_text("utf-8")):
            problems.append(f"{target}: no such heading")
    return problems


def linked(page: str) -> set[Path]:
    """The files that a page links to."""
    targets = LINK.findall(text_of(page))
    folder = (ROOT / page).parent
    return {(folder / one.partition("#")[0]).resolve() for one in targets if ":" not in one}


def commands(text: str) -> list[str]:
    """Lines of code blocks that run exitserve, continued lines joined, comments cut."""
    code = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    code += [
        line[4:]
        for before, line in pairwise(["", *lines])
        if line[:4] == "    " and before[:1] != "-"
    ]
    joined = re.sub(r" *\\\n *", " ", "\n".join(code))
    return [
        match[1].split("#")[0].strip()
        for match in re.finditer(r"^(?:\.venv/bin/)?exitserve (.*)$", joined, flags=re.MULTILINE)
    ]


def is_understood(command: str) -> bool:
    """Whether the command line accepts the words; it runs nothing."""
    words = [word for word in shlex.split(command) if word not in ("...", "[key=value")]
    parser = build_parser()
    try:
        _, rest = parser.parse_known_args(words)
    except SystemExit:
        return False
    return words[0] == "serve" or not rest


@pytest.mark.parametrize("page", pages())
def test_lines_are_wrapped(page: str) -> None:
    assert not too_long(text_of(page)), f"longer than {WIDTH} characters"


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page: str) -> None:
    assert not broken_links(page, text_of(page))


def test_every_page_is_in_the_index() -> None:
    index = linked("docs/README.md") | linked("docs/papers.md")
    missing = [
        page
        for page in pages()
        if page.startswith("docs/") and (ROOT / page).resolve() not in index
    ]
    assert missing == ["docs/README.md"]


@pytest.mark.parametrize("page", ["README.md", *(one for one in pages() if "docs/" in one)])
def test_commands_are_understood(page: str) -> None:
    assert not [one for one in commands(text_of(page)) if not is_understood(one)]
