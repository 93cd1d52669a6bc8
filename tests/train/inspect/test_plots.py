"""The figures of `exitserve inspect`: they can be drawn, and say what their axes are."""

import io
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from matplotlib.figure import Figure

from exitserve.errors import ExitServeError
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


@pytest.mark.parametrize(
    ("draw", "labels"),
    [
        (lambda: by_depth(CURVES, "similarity (no unit)"), [(DEPTH, "similarity (no unit)")]),
        (
            lambda: by_depth({"NC1": {3: 1.5}}, "NC1 (no unit)", exit_layers=(2, 4), limits=(0, 2)),
            [(DEPTH, "NC1 (no unit)")],
        ),
        (
            lambda: heat_map({"COS": torch.eye(3), "CKA": -torch.eye(3)}, [1, 2, 6], title="tiny"),
            [(DEPTH, DEPTH), (DEPTH, ""), ("", "similarity (no unit)")],
        ),
        (
            lambda: heat_map({"COS": torch.eye(48)}, range(1, 49)),
            [(DEPTH, DEPTH), ("", "similarity (no unit)")],
        ),
        (
            lambda: box_plot({1: [0.1, 0.2, 0.9], 2: torch.rand(50)}, "cosine (no unit)"),
            [(DEPTH, "cosine (no unit)")],
        ),
        (
            lambda: stacked_histograms(histograms(4), [1, 2, 3, 6], means={1: 0.1, 6: 0.2}),
            [
                (DEPTH, "cosine of two tokens' states (no unit)"),
                ("", "share of pairs per bin of 0.1"),
            ],
        ),
        # Nothing was counted.
        (
            lambda: stacked_histograms(histograms(4) * 0, [1, 2, 3, 6]),
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


def test_curves_are_drawn_in_order_of_depth_and_told_apart() -> None:
    (axes,) = by_depth({"a": {6: 3.0, 1: 1.0}, "b": {1: 2.0}}, "y", exit_layers=[2]).axes
    first, second, exit_layer = axes.get_lines()
    assert first.get_xydata().tolist() == [[1.0, 1.0], [6.0, 3.0]]
    assert first.get_marker() != second.get_marker()
    assert exit_layer.get_xdata() == [2, 2]
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b", "exit layer"]


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (6, 6), (13, 13), (14, 7), (48, 12)])
def test_depths_are_named_as_far_as_there_is_room(count: int, shown: int) -> None:
    depths = [10 * i for i in range(1, count + 1)]
    axes = stacked_histograms(histograms(count), depths).axes[0]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert len(names) == shown
    assert str(depths[-1]) in names
    positions = axes.get_xticks()
    assert [str(10 * (int(position) + 1)) for position in positions] == names


def test_small_matrices_have_their_numbers_written_in() -> None:
    axes = heat_map({"COS": torch.tensor([[1.0, -0.35], [-0.35, 1.0]])}, [2, 6]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "-0.35", "-0.35", "1.00"]
    assert axes.images[0].get_clim() == (-0.4, 1.0)
    assert not heat_map({"COS": torch.eye(9)}, range(9)).axes[0].texts


def test_columns_of_histograms_start_at_the_lowest_cosine() -> None:
    axes = stacked_histograms(torch.tensor([[0.9, 0.1], [0.0, 1.0]]), [1, 2]).axes[0]
    # Rows from below: cosines -1 to 0, then 0 to 1; columns are depths.
    assert axes.images[0].get_array().tolist() == [
        pytest.approx([0.9, 0.0]),
        [pytest.approx(0.1), 1],
    ]
    assert axes.images[0].origin == "lower"
    assert axes.get_ylim() == (-1.0, 1.0)


def test_boxes_are_ordered_by_depth() -> None:
    axes = box_plot({5: [2.0, 2.0], 1: [1.0, 1.0]}, "y").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "5"]
    medians = [line for line in axes.get_lines() if line.get_color() == "#d62728"]
    assert [float(line.get_ydata()[0]) for line in medians] == [1.0, 2.0]


DEPTHS: Sequence[int] = [1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_depth({}, "y"), r"curves \[\] cannot be drawn"),
        (lambda: by_depth({"a": {}}, "y"), r"curves \['a'\]"),
        (lambda: heat_map({}, DEPTHS), "one or more"),
        (lambda: heat_map({"COS": torch.eye(3)}, DEPTHS), r"\(3, 3\).*expected.*\(2, 2\)"),
        (lambda: box_plot({}, "y"), r"samples of depths \[\]"),
        (lambda: box_plot({1: []}, "y"), r"samples of depths \[1\]"),
        (lambda: stacked_histograms(histograms(3), DEPTHS), r"\(3, 20\) do not fit 2 depths"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Figure], message: str) -> None:
    with pytest.raises(ExitServeError, match=message):
        call()


def test_a_missing_value_leaves_a_gap() -> None:
    assert picture(by_depth({"NC1": {1: 2.0, 2: math.nan, 3: 1.0}}, "NC1 (no unit)"))
