"""The page for people: a warning first, what is retained, where it was measured; and the plot."""

from __future__ import annotations

from exitserve.evaluation.page import (
    LOSSLESS,
    LOSSY,
    SHORT_HEADERS,
    markdown,
    text_rows,
    warning_of,
)


def test_the_warning_comes_first_and_the_hardware_is_told(report) -> None:
    page = markdown(report)
    assert page.index(LOSSY) < page.index("| setting")
    assert "a CPU, 2 cores" in page
    assert "| threshold 0.5 |     3 |           40.0% |     0.900 |" in page
    assert "| 2          | 0.700 |  1.70 |" in page


def test_verifying_alone_is_lossless() -> None:
    assert warning_of({"cases": [{"mode": "off"}, {"mode": "verify"}]}) == LOSSLESS
    assert warning_of({"cases": [{"mode": "off"}, {"mode": "defer"}]}) == LOSSY


def test_the_terminal_table_fits_its_rows_and_eighty_characters(report) -> None:
    from rich.console import Console

    from exitserve.report import terminal_table

    console = Console(width=80, record=True, quiet=True)
    table = terminal_table("t", SHORT_HEADERS, text_rows(report["cases"]))
    assert console.measure(table).maximum <= 80
