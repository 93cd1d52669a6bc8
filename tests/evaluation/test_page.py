"""The page for people: a warning first, what is retained, where it was measured; and the plot."""

from __future__ import annotations

from pathlib import Path

from exitserve.evaluation.page import (
    LOSSLESS,
    LOSSY,
    SHORT_HEADERS,
    SHORT_TASK_HEADERS,
    markdown,
    plot,
    task_rows,
    text_rows,
    warning_of,
)


def test_the_warning_comes_first_and_the_hardware_is_told(report) -> None:
    page = markdown(report(0.8, 0.6, 0.7))
    assert page.index(LOSSY) < page.index("| task")
    assert "Minimum retained: 75.0% (my_task, threshold 0.5)." in page
    assert "a CPU, 2 cores" in page
    assert "lm-eval 0.4" in page
    assert "| threshold 0.5 |     3 |           40.0% |     0.900 |" in page


def test_without_tasks_the_page_speaks_of_text_alone(report) -> None:
    page = markdown(report())
    assert "## Tasks" not in page and "Minimum retained" not in page
    assert "## Held-out text" in page
    assert "| 2          | 0.700 |  1.70 |" in page


def test_scores_of_zero_leave_dashes(report) -> None:
    assert [row[3] for row in task_rows(report(0.0, 0.0, 0.0)["cases"])] == ["-", "-", "-"]


def test_verifying_alone_is_lossless() -> None:
    assert warning_of({"cases": [{"mode": "off"}, {"mode": "verify"}]}) == LOSSLESS
    assert warning_of({"cases": [{"mode": "off"}, {"mode": "defer"}]}) == LOSSY


def test_terminal_tables_fit_their_rows_and_eighty_characters(report) -> None:
    from rich.console import Console

    from exitserve.report import terminal_table

    cases = report(0.8, 0.6, 0.7)["cases"]
    for headers, rows in (
        (SHORT_HEADERS, text_rows(cases)),
        (SHORT_TASK_HEADERS, task_rows(cases)),
    ):
        console = Console(width=80, record=True, quiet=True)
        assert console.measure(terminal_table("t", headers, rows)).maximum <= 80


def test_the_plot_has_a_panel_for_each_mode_and_a_line_for_each_score(
    report, tmp_path: Path
) -> None:
    figure = plot(report(0.8, 0.6, 0.7))
    assert [panel.get_title() for panel in figure.axes] == ["confidence", "defer"]
    for panel, retained in zip(figure.axes, (75.0, 87.5), strict=True):
        agreement, perplexity, task, _ = panel.get_lines()
        assert agreement.get_label() == "agreement, held-out text"
        assert perplexity.get_label() == "perplexity, held-out text"
        assert task.get_label() == "my_task"
        assert sorted(task.get_ydata()) == [retained, 100.0]
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
