"""Progress in a log file: lines, each once, instead of a bar."""

import io

import pytest

from exitserve.reporting.progress import share_bar, step_bars


def test_a_share_of_the_work_gives_a_line_for_each_description() -> None:
    stream = io.StringIO()
    with share_bar(stream) as progress:
        for doing, done in (("starting", 0.0), ("running", 0.25), ("running", 0.5), ("[end]", 1.0)):
            progress(doing, done)
    assert stream.getvalue() == "[  0%, 0 s] starting\n[ 25%, 0 s] running\n[100%, 0 s] [end]\n"


def test_steps_give_a_line_for_each_kind_of_work(capsys: pytest.CaptureFixture[str]) -> None:
    with step_bars() as progress:
        for doing, done in (("reading", 0), ("reading", 1), ("testing", 0)):
            progress(doing, done, 2)
    captured = capsys.readouterr()
    assert captured.err == "reading (2)\ntesting (2)\n"
    assert captured.out == ""
