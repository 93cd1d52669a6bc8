"""Figures of measures against depth, about as wide as a page's column.

Each function returns a figure that belongs to no window: `matplotlib.figure.Figure`, not pyplot.
L depths, shown as equal steps in all plots but `by_depth`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from exitserve.errors import ExitServeError

DEPTH = "depth (layers run)"
"""The label of every axis of depths."""

_WIDTH, _HEIGHT = 5.6, 3.6
"""Inches of a single panel."""

_STYLES = (
    ("#1f77b4", "o", "-"),
    ("#d62728", "s", "--"),
    ("#2ca02c", "D", "-."),
    ("#9467bd", "^", ":"),
    ("#ff7f0e", "v", "-"),
    ("#8c564b", "P", "--"),
    ("#17becf", "X", "-."),
    ("#7f7f7f", "*", ":"),
)
"""Colour, marker and line of the first, second, ... curve: they differ in print without colour."""

_MOST_TICKS = 13
_MOST_SHARES = 5
_MOST_NUMBERS = 8
"""A matrix of more layers has cells too small for a number."""


def by_depth(
    curves: Mapping[str, Mapping[int, float]],
    ylabel: str,
    *,
    title: str = "",
    exit_layers: Sequence[int] = (),
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draws one or several quantities against depth.

    Args:
        curves: a label each, shown if there are several, and the values by depth.
        ylabel: what the values are, with their unit.
        title: above the plot.
        exit_layers: depths to mark with a vertical line.
        limits: of the values; the axis goes a little further, so that markers on a limit are
            whole. None to fit the values.

    Raises:
        ExitServeError: there is no curve, or one has no values.
    """
    if not curves or not all(curves.values()):
        raise ExitServeError(
            f"curves {list(curves)} cannot be drawn; expected at least one, each with the value "
            f"of a depth or more."
        )
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    for (label, curve), (colour, marker, line) in zip(
        curves.items(), itertools.cycle(_STYLES), strict=False
    ):
        depths = sorted(curve)
        axes.plot(
            depths,
            [curve[depth] for depth in depths],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            label=label,
        )
    _mark_exits(axes, exit_layers)
    if limits is not None:
        room = 0.03 * (limits[1] - limits[0])
        axes.set_ylim(limits[0] - room, limits[1] + room)
    axes.set_xticks(_named(sorted({depth for curve in curves.values() for depth in curve})))
    _name(axes, title, ylabel)
    axes.grid(alpha=0.25)
    if len(curves) > 1 or exit_layers:
        # As many to a line as fit the figure, whose width takes about 85 letters and lines.
        widest = 8 + max(map(len, [*curves, "exit layer"]))
        figure.legend(
            loc="outside lower center",
            ncols=max(1, min(4, 85 // widest)),
            fontsize=8,
            frameon=False,
            handlelength=3.5,
        )
    return figure


def heat_map(
    matrices: Mapping[str, Tensor], depths: Sequence[int], *, title: str = "", unit: str = "no unit"
) -> Figure:
    """Draws matrices of all pairs of layers side by side, in one scale of colours up to 1.

    The scale starts at 0, or lower where a value is negative. With few layers each cell has its
    number written in it.

    Args:
        matrices: [L, L] each, finite, under the name of its panel ("COS", "CKA").
        depths: the L depths.
        title: above all panels.
        unit: of the values, for the scale of colours.

    Raises:
        ExitServeError: there is no matrix, or one is not [L, L].
    """
    count = len(depths)
    shapes = [tuple(matrix.shape) for matrix in matrices.values()]
    if not shapes or any(shape != (count, count) for shape in shapes):
        raise ExitServeError(
            f"matrices of shapes {shapes} do not fit {count} depths; expected one or more, each "
            f"({count}, {count})."
        )
    figure = Figure(figsize=(1.2 + 3.2 * len(shapes), _HEIGHT + 0.3), layout="compressed")
    panels = figure.subplots(1, len(shapes), squeeze=False)[0]
    lowest = min(0.0, min(float(matrix.min()) for matrix in matrices.values()))
    # Rounded down to tenths, so that the scale ends at a number that can be read off.
    lowest = math.floor(lowest * 10) / 10
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        values = matrix.detach().double().cpu()
        image = panel.imshow(values.numpy(), vmin=lowest, vmax=1.0, cmap="viridis", origin="lower")
        _tick_depths(panel, depths, both=True)
        _name(panel, name, DEPTH if panel is panels[0] else "")
        if count <= _MOST_NUMBERS:
            _write_numbers(panel, values, middle=(1.0 + lowest) / 2)
    figure.colorbar(image, ax=list(panels), shrink=0.85, label=f"similarity ({unit})")
    figure.suptitle(title, fontsize=11)
    return figure


def box_plot(
    samples_by_depth: Mapping[int, Tensor | Sequence[float]], ylabel: str, *, title: str = ""
) -> Figure:
    """Draws the distribution of a quantity over samples, a box for each depth.

    As in the aligned-training paper's appendix A: median, quartiles, whiskers to the last sample
    within 1.5 times the box, and a dot for each sample beyond.

    Args:
        samples_by_depth: finite samples by depth.
        ylabel: what the samples are, with their unit.
        title: above the plot.

    Raises:
        ExitServeError: there is no depth, or one has no sample.
    """
    depths = sorted(samples_by_depth)
    samples = [
        torch.as_tensor(samples_by_depth[depth], dtype=torch.float64).detach().cpu().flatten()
        for depth in depths
    ]
    if not samples or not all(map(len, samples)):
        raise ExitServeError(
            f"samples of depths {depths} cannot be drawn; expected at least one depth, each with "
            f"a sample or more."
        )
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.boxplot(
        [sample.numpy() for sample in samples],
        positions=range(len(depths)),
        widths=0.6,
        patch_artist=True,
        boxprops={"facecolor": "#c6dbef", "edgecolor": "#1f77b4"},
        medianprops={"color": "#d62728", "linewidth": 1.4},
        whiskerprops={"color": "#1f77b4"},
        capprops={"color": "#1f77b4"},
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": "#999999"},
    )
    _tick_depths(axes, depths)
    _name(axes, title, ylabel)
    axes.grid(alpha=0.25, axis="y")
    return figure


def stacked_histograms(
    histograms: Tensor,
    depths: Sequence[int],
    *,
    means: Mapping[int, float] | None = None,
    title: str = "",
) -> Figure:
    """Draws histograms of cosines as columns of a heat map over depth.

    The dispersion-loss paper's figure 2. Colours follow the square root of the share: half of
    the pairs may lie in one bin, and the rest must still be seen.

    Args:
        histograms: [L, bins], the share of pairs in each of equal bins over [-1, 1].
        depths: the L depths.
        means: mean cosine by depth, drawn as a line.
        title: above the plot.

    Raises:
        ExitServeError: histograms are not [L, bins].
    """
    if histograms.dim() != 2 or histograms.numel() == 0 or len(histograms) != len(depths):
        raise ExitServeError(
            f"histograms of shape {tuple(histograms.shape)} do not fit {len(depths)} depths; "
            f"expected ({len(depths)}, bins), none of them 0."
        )
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        histograms.detach().double().cpu().numpy().T,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, len(depths) - 0.5, -1.0, 1.0),
        cmap="viridis",
        norm=PowerNorm(0.5, vmin=0.0),
    )
    if means is not None:
        known = [i for i, depth in enumerate(depths) if depth in means]
        axes.plot(
            known,
            [means[depths[i]] for i in known],
            color="white",
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label="mean",
        )
        axes.legend(loc="lower left", fontsize=8, facecolor="#555555", labelcolor="white")
    _tick_depths(axes, depths)
    _name(axes, title, "cosine of two tokens' states (no unit)")
    width = 2.0 / histograms.shape[1]
    figure.colorbar(
        image, label=f"share of pairs per bin of {width:.3g}", ticks=MaxNLocator(_MOST_SHARES)
    )
    return figure


def _mark_exits(axes: Axes, exit_layers: Sequence[int]) -> None:
    """Draws a line at each exit layer, only the first of which has a label."""
    for i, depth in enumerate(exit_layers):
        axes.axvline(
            depth,
            color="#777777",
            linestyle=(0, (1, 2)),
            linewidth=1.2,
            zorder=0,
            label="exit layer" if i == 0 else None,
        )


def _name(axes: Axes, title: str, ylabel: str) -> None:
    """Writes a panel's title and the labels of its axes, the lower one of which is depth."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(DEPTH)
    axes.set_ylabel(ylabel)


def _tick_depths(axes: Axes, depths: Sequence[int], *, both: bool = False) -> None:
    """Names equal steps along an axis (or both) by depth: all, or some where there are many."""
    shown = _named(range(len(depths)))
    labels = [str(depths[i]) for i in shown]
    axes.set_xticks(shown, labels)
    if both:
        axes.set_yticks(shown, labels)


def _named(values: Sequence[int]) -> Sequence[int]:
    """Returns so many of the values as fit an axis, the last one among them."""
    step = math.ceil(len(values) / _MOST_TICKS)
    return values[(len(values) - 1) % step :: step]


def _write_numbers(axes: Axes, values: Tensor, middle: float) -> None:
    """Writes each cell's value into it, dark on the light colours above `middle`."""
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            colour = "black" if value > middle else "white"
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour
            )
