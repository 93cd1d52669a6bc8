"""The figures of inspections: they can be drawn, and say what their axes are."""

import io
from collections.abc import Callable

import pytest
import torch
from matplotlib.figure import Figure

from exitserve_training.inspect.plots import (
    DEPTH,
    box_plot,
    by_depth,
    heat_map,
    stacked_histograms,
)

CURVES = {"COS": {1: 0.2, 2: 0.5, 6: 1.0}, "CKA": {1: 0.1, 2: 0.7, 6: 1.0}}


def picture(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=60)
    return file.getvalue()


def labels_of(figure: Figure) -> list[tuple[str, str]]:
    return [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]


def histograms(count: int) -> torch.Tensor:
    return torch.eye(count, 20, dtype=torch.float64)


MEANS = {1: 0.1, 2: 0.1, 3: 0.2, 6: 0.2}


@pytest.mark.parametrize(
    ("draw", "labels"),
    [
        (lambda: by_depth(CURVES, "similarity (no unit)"), [(DEPTH, "similarity (no unit)")]),
        (
            lambda: by_depth({"NC1": {3: 1.5}}, "NC1 (no unit)", exit_layers=(2, 4)),
            [(DEPTH, "NC1 (no unit)")],
        ),
        (
            lambda: heat_map({"COS": torch.eye(3), "CKA": -torch.eye(3)}, [1, 2, 6]),
            [(DEPTH, DEPTH), (DEPTH, ""), ("", "similarity (no unit)")],
        ),
        (
            lambda: heat_map({"COS": torch.eye(48)}, range(1, 49)),
            [(DEPTH, DEPTH), ("", "similarity (no unit)")],
        ),
        (
            lambda: box_plot({1: torch.rand(3), 2: torch.rand(50)}, "cosine (no unit)"),
            [(DEPTH, "cosine (no unit)")],
        ),
        (
            lambda: stacked_histograms(histograms(4), [1, 2, 3, 6], means=MEANS),
            [
                (DEPTH, "cosine of two tokens' states (no unit)"),
                ("", "share of pairs per bin of 0.1"),
            ],
        ),
        # Nothing was counted.
        (
            lambda: stacked_histograms(histograms(4) * 0, [1, 2, 3, 6], means=MEANS),
            [
                (DEPTH, "cosine of two tokens' states (no unit)"),
                ("", "share of pairs per bin of 0.1"),
            ],
        ),
    ],
    ids=["lines", "line", "heat", "heat of many", "boxes", "histograms", "no histograms"],
)
def test_figures_are_drawn_and_labelled(
    draw: Callable[[], Figure], labels: list[tuple[str, str]]
) -> None:
    figure = draw()
    assert len(picture(figure)) > 1000
    assert labels_of(figure) == labels
