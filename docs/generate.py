"""Writes the parts of the documentation that follow from the code.

    .venv/bin/python docs/generate.py

Generated are the pages and sections of `PARTS`: what commands accept, what is exported, and what
`exitserve plan` computes. They are committed, so that they can be read without building the site,
and a test (`tests/packaging/test_site.py`) fails if one is not what the code gives.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from exitserve.costs.sources import CostSource

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
    """Every command with its arguments, from the parsers; examples stay in `--help`."""
    from exitserve.cli import build_parser

    (subparsers,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parsers = subparsers.choices
    users: dict[tuple[str, str], list[str]] = {}
    for name, parser in parsers.items():
        for action in _shown(parser._actions):
            users.setdefault(_argument(action, parser), []).append(name)
    shared = {row: names for row, names in users.items() if len(names) >= SEVERAL}
    rows = [(*row, ", ".join(f"`{one}`" for one in names)) for row, names in shared.items()]
    several = ["## Of several commands", table(("argument", "meaning", "commands"), rows)]
    parts = [_command(name, one, set(shared)) for name, one in parsers.items()]
    return "\n\n".join([*parts, *several])


SEVERAL = 3
"""Commands that share an argument, from which on it is described once for all of them."""


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    return [one for one in actions if "--help" not in one.option_strings]


def _command(name: str, parser: argparse.ArgumentParser, shared: set[tuple[str, str]]) -> str:
    words = [_placeholder(action) for action in parser._actions if not action.option_strings]
    usage = " ".join([parser.prog, *words, "[options]"])
    parts = [f"## {name}", f"```text\n{usage}\n```"]
    parts += _blocks(parser.description or "")
    rows: dict[str, list[tuple[str, str]]] = {"": []}
    for group in parser._action_groups:
        # argparse's own groups have no titles of ours.
        standard = group.title in ("options", "positional arguments")
        title = "" if standard else str(group.title)
        written = (_argument(one, parser) for one in _shown(group._group_actions))
        rows.setdefault(title, []).extend(row for row in written if row not in shared)
    for title, arguments in rows.items():
        if arguments:
            parts += [_titled(f"{title}:")] if title else []
            parts.append(table(("argument", "meaning"), arguments))
    return "\n\n".join(parts)


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
            ", ".join(f"`{label}`" for label in metric.by),
            f"`{metric.promql}`",
        )
        for metric in METRICS
    ]
    return table(("metric", "meaning", "more labels", "PromQL"), rows)


# Fields of requests and responses


def fields(*names: str) -> Callable[[], str]:
    """What writes a table for each of these models of `exitserve.server.api_description`."""

    def write() -> str:
        from exitserve.server import api_description

        return "\n\n".join(_fields(getattr(api_description, name)) for name in names)

    return write


def _fields(model: type[BaseModel]) -> str:
    properties = model.model_json_schema()["properties"]
    rows = [(f"`{name}`", _kind(one), one["description"]) for name, one in properties.items()]
    return f"{model.__doc__}\n\n{table(('field', 'type', 'meaning'), rows)}"


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a field, in words."""
    match schema:
        case {"anyOf": kinds}:
            return " or ".join(map(_kind, kinds))
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"const": value}:
            return f"`{value}`"
        case {"$ref": _}:
            return "object"
        case {"type": "array", "items": items}:
            return f"list of {_kind(items)}s"
        case {"type": "object", "additionalProperties": dict(kind)}:
            return f"object of {_kind(kind)}s"
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below"}
    limits = (f" {word} {schema[name]:g}" for name, word in bounds.items() if name in schema)
    return f"{schema['type']}{','.join(limits)}"


# What plans say of well-known shapes

SHAPES = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3-8b")
"""Files of `docs/shapes`: of a `config.json`, what the costs of a step depend on."""
MACHINES = ("cpu", "rtx4090", "h100", "h200")
BATCHES = (1, 8, 32)
CONTEXT = 1024
EXIT_SHARE = 0.5
ACCEPTED = {"verify": 0.49, "defer": 0.7}
"""Of their drafts; the first is SmolLM2-135M's at this depth, the other is assumed."""
DRAFT_DEPTH = 1 / 5
DRAFT_DEPTHS = {"an eighth": 1 / 8, "a quarter": 1 / 4}
GAINS = (1.0, 1.3, 1.6)


@cache
def costs_of(shape: str, gpu: str) -> CostSource:
    """What the parts of a step cost at least, by the GPU's figures."""
    from exitserve.costs.sources import step_costs

    config = json.loads((DOCS / "shapes" / f"{shape}.json").read_text(encoding="utf-8"))
    return step_costs(config, batch_sizes=BATCHES, context=CONTEXT, device=gpu)


@cache
def plan(shape: str, gpu: str) -> dict[str, Any]:
    """The report of `exitserve plan docs/shapes/SHAPE.json --device GPU --context CONTEXT`."""
    from exitserve.planning.run import make_plan

    return make_plan(
        costs_of(shape, gpu),
        model=shape,
        batch_sizes=BATCHES,
        context=CONTEXT,
        exit_share=EXIT_SHARE,
        block=None,
    )


def of_shapes(columns: Sequence[str], cells: Callable[[str], Sequence[str]]) -> str:
    """A table with a row for each shape."""
    return table(("", *columns), [(f"`{shape}`", *cells(shape)) for shape in SHAPES])


def step_times() -> str:
    """The least time of a step at batch 1, in milliseconds."""

    def cells(shape: str) -> list[str]:
        return [f"{1e3 * costs_of(shape, gpu).costs.full(1):.2f}" for gpu in MACHINES]

    return of_shapes(MACHINES, cells)


def gains() -> str:
    """Wall speedup by device, shape, mode and batch size."""
    from exitserve.planning.run import best_drafting, gain_of

    def cells(shape: str, device: str) -> list[str]:
        costs = costs_of(shape, device).costs
        layer = round(DRAFT_DEPTH * costs.num_layers)
        found = [
            [
                best_drafting(costs, batch, layer, accepted, checks=checks, alike=device != "cpu")[
                    "wall_speedup"
                ]
                for batch in BATCHES
            ]
            for checks, accepted in zip((False, True), ACCEPTED.values(), strict=True)
        ]
        best = plan(shape, device)["best"]
        found.append([gain_of(best, batch, EXIT_SHARE) for batch in BATCHES])
        return ["/".join(f"{gain:.2f}" for gain in one) for one in found]

    modes = [f"`{mode}`" for mode in (*ACCEPTED, "confidence")]
    rows = [
        (device, f"`{shape}`", *cells(shape, device)) for device in MACHINES for shape in SHAPES
    ]
    return table(("", "", *modes), rows)


def acceptances() -> str:
    """The share of drafts that must be accepted to gain so much, at batch 8."""
    from exitserve.costs.drafting import MOST_DRAFTS, Drafting, drafting_speedup

    def least(shape: str, depth: float, wanted: float) -> str:
        costs = costs_of(shape, "h100").costs
        layer = round(depth * costs.num_layers)
        ways = [Drafting(exit_layer=layer, drafts=k) for k in range(1, MOST_DRAFTS + 1)]
        for percent in range(1, 100):
            if max(drafting_speedup(costs, 8, way, percent / 100) for way in ways) > wanted:
                return f"{percent} %"
        return "never"

    def cells(shape: str) -> list[str]:
        return [least(shape, depth, gain) for depth in DRAFT_DEPTHS.values() for gain in GAINS]

    return of_shapes([f"{part}: {gain:g}" for part in DRAFT_DEPTHS for gain in GAINS], cells)


PARTS: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "metrics.md": (
        ("metrics", metrics),
        (
            "stats",
            fields("Stats", "Period", "LayerChecks"),
        ),
    ),
    "reference/commands.md": (("commands", commands),),
    "reference/http.md": (
        ("request", fields("RequestFields")),
        ("response", fields("ResponseFields", "ChoiceFields", "ExitMetrics")),
    ),
    "will-it-pay.md": (
        ("step-times", step_times),
        ("acceptances", acceptances),
        ("gains", gains),
    ),
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
