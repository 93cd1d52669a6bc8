"""Writes the parts of the documentation that follow from the code.

    .venv/bin/python docs/generate.py

Generated are the pages and sections of `PARTS`: what commands accept, what is exported, and what
`exitserve plan` computes. They are committed, so that they can be read without building the site,
and a test (`tests/packaging/test_generated.py`) fails if one is not what the code gives.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).parent
BEGIN = "<!-- {name}: written by docs/generate.py -->"
END = "<!-- end -->"
WIDTH = 100


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    cells = [headers, ["---"] * len(headers), *rows]
    lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in cells)
    return "\n".join(f"| {line} |" for line in lines)


# Commands


def commands() -> str:
    """Every command with its arguments, from the parsers."""
    from exitserve.cli import build_parser

    (subparsers,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return "\n\n".join(_command(name, one) for name, one in subparsers.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    words = [_placeholder(action) for action in parser._actions if not action.option_strings]
    usage = " ".join([parser.prog, *words, "[options]"])
    parts = [f"## {name}", f"```text\n{usage}\n```"]
    parts += _blocks(parser.description or "")
    rows: dict[str, list[tuple[str, str]]] = {"": []}
    for group in parser._action_groups:
        # argparse's own groups have no titles of ours.
        standard = group.title in ("options", "positional arguments")
        shown = [one for one in group._group_actions if "--help" not in one.option_strings]
        title = "" if standard else str(group.title)
        rows.setdefault(title, []).extend(_argument(one, parser) for one in shown)
    for title, arguments in rows.items():
        if arguments:
            parts += [_titled(f"{title}:")] if title else []
            parts.append(table(("argument", "meaning"), arguments))
    return "\n\n".join([*parts, *_blocks(parser.epilog or "")])


def _placeholder(action: argparse.Action) -> str:
    shown = str(action.metavar or action.dest)
    if action.nargs == "*":
        return f"[{shown} ...]"
    return f"[{shown}]" if action.nargs == "?" else shown


def _argument(action: argparse.Action, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """One row: how it is written, and what it means."""
    meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
    if not action.option_strings:
        return f"`{_placeholder(action)}`", meaning
    value = ""
    if action.nargs != 0:
        choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
        shown = str(action.metavar or choices or action.dest.upper())
        value = f" {shown} [{shown} ...]" if action.nargs == "+" else f" {shown}"
    written = ", ".join(f"`{option}{value}`" for option in action.option_strings)
    return written, f"{meaning} (required)" if action.required else meaning


def _titled(line: str) -> str:
    """The line with a capital at its beginning, if it introduces what follows."""
    return line[:1].upper() + line[1:] if line.endswith(":") else line


def _blocks(text: str) -> Iterator[str]:
    """A help text as Markdown: its indented lines become code, the others stay paragraphs."""
    lines = text.strip().splitlines()
    code: list[str] = []
    prose: list[str] = []

    def finished() -> Iterator[str]:
        if prose:
            yield "\n".join(textwrap.fill(line, WIDTH) for line in prose)
        if any(code):
            yield "\n".join(["```text", *"\n".join(code).strip("\n").splitlines(), "```"])
        prose.clear()
        code.clear()

    for line in [*lines, ""]:
        if line.startswith("  ") or (not line and code):
            if prose:
                yield from finished()
            code.append(line.removeprefix("  "))
        elif line:
            if code:
                yield from finished()
            prose.append(_titled(line))
        else:
            yield from finished()
    yield from finished()


# Metrics


def metrics() -> str:
    """Every metric that a server exports."""
    from exitserve.server.metrics import METRICS

    rows = [
        (
            f"`{metric.name}`",
            f"{'A gauge. ' if metric.is_gauge else ''}{metric.help}",
            ", ".join(f"`{label}`" for label in metric.labels),
            f"`{metric.promql}`",
        )
        for metric in METRICS
    ]
    return table(("metric", "meaning", "labels", "PromQL"), rows)


PARTS: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "metrics.md": (("metrics", metrics),),
    "reference/commands.md": (("commands", commands),),
}
"""By page: the name of each generated section, and what writes it."""


def with_section(page: str, name: str, text: str) -> str:
    """The page with the section `name` replaced.

    Raises:
        ValueError: the page has no such section.
    """
    begin = BEGIN.format(name=name)
    section = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(section.findall(page)) != 1:
        raise ValueError(f"the page needs one section that begins with {begin} and ends with {END}")
    return section.sub(lambda _: f"{begin}\n\n{text}\n\n{END}", page)


def generated(name: str) -> str:
    """A page of `PARTS` as it should be."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for section, write in PARTS[name]:
        page = with_section(page, section, write())
    return page


def main() -> None:
    """Writes all of them."""
    for name in PARTS:
        page = generated(name)
        (DOCS / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
