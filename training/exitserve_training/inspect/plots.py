"""Figures of measures against depth, about as wide as a page's column.

Each function returns a figure that belongs to no window: `matplotlib.figure.Figure`, not pyplot.
L depths, shown as equal steps in all plots but `by_depth`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

DEPTH = "depth (layers run)"
"""The label of every axis of depths."""

_WIDTH, _HEIGHT = 5.6, 3.6
"""Inches of a single panel."""

_STYLES = (("o", "-"), ("s", "--"), ("D", "-."), ("^", ":"), ("v", "-"), ("P", "--"), ("X", "-."))
"""Marker and line of the first, second, ... curve: they differ in print without colour."""

_MOST_TICKS = 13


def by_depth(
    curves: Mapping[str, Mapping[int, float]], ylabel: str, exit_layers: Sequence[int]
) -> Figure:
    """Draws one or several quantities against depth.

    Args:
        curves: a label each, shown if there are several, and the values by depth.
        ylabel: what the values are, with their unit.
        exit_layers: depths to mark with a vertical line.
    """
    figure, axes = _panel()
    styles = itertools.cycle(_STYLES)
    for (label, curve), (marker, line) in zip(curves.items(), styles, strict=False):
        depths = sorted(curve)
        values = [curve[depth] for depth in depths]
        axes.plot(depths, values, marker=marker, linestyle=line, markersize=4, label=label)
    for number, depth in enumerate(exit_layers):
        # Only the first of them has a label; matplotlib leaves out those that begin so.
        label = "exit layer" if number == 0 else "_"
        axes.axvline(depth, color="grey", linestyle=":", zorder=0, label=label)
    axes.set_xticks(_named(sorted({depth for curve in curves.values() for depth in curve})))
    _name(axes, "", ylabel)
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


def heat_map(matrices: Mapping[str, Tensor], depths: Sequence[int]) -> Figure:
    """Draws matrices [L, L] of all pairs of layers side by side, in one scale of colours up to 1.

    The scale starts at 0, or lower where a value is negative.

    Args:
        matrices: under the names of their panels ("COS", "CKA").
        depths: the L depths.
    """
    figure = Figure(figsize=(1.2 + 3.2 * len(matrices), _HEIGHT + 0.3), layout="compressed")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    lowest = min(0.0, min(float(matrix.min()) for matrix in matrices.values()))
    # Rounded down to tenths, so that the scale ends at a number that can be read off.
    lowest = math.floor(lowest * 10) / 10
    for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
        image = panel.imshow(matrix.numpy(), vmin=lowest, vmax=1.0, cmap="viridis", origin="lower")
        _tick_depths(panel, depths)
        panel.set_yticks(panel.get_xticks(), panel.get_xticklabels())
        _name(panel, name, DEPTH if panel is panels[0] else "")
    figure.colorbar(image, ax=list(panels), shrink=0.85, label="similarity (no unit)")
    return figure


def box_plot(samples_by_depth: Mapping[int, Tensor], ylabel: str) -> Figure:
    """Draws the distribution of a quantity over samples, a box for each depth.

    As in the aligned-training paper's appendix A: median, quartiles, whiskers to the last sample
    within 1.5 times the box, and a dot for each sample beyond.
    """
    depths = sorted(samples_by_depth)
    figure, axes = _panel()
    axes.boxplot(
        [samples_by_depth[depth].numpy() for depth in depths],
        positions=range(len(depths)),
        widths=0.6,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": "darkgrey"},
    )
    _tick_depths(axes, depths)
    _name(axes, "", ylabel)
    axes.grid(alpha=0.25, axis="y")
    return figure


def stacked_histograms(
    histograms: Tensor, depths: Sequence[int], *, means: Sequence[float], title: str
) -> Figure:
    """Draws histograms of cosines as columns of a heat map over depth.

    The dispersion-loss paper's figure 2. Colours follow the square root of the share: half of
    the pairs may lie in one bin, and the rest must still be seen.

    Args:
        histograms: [L, bins], the share of pairs in each of equal bins over [-1, 1].
        depths: the L depths.
        means: mean cosine at each depth, drawn as a line.
        title: above the plot.
    """
    figure, axes = _panel()
    image = axes.imshow(
        histograms.numpy().T,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, len(depths) - 0.5, -1.0, 1.0),
        cmap="viridis",
        norm=PowerNorm(0.5, vmin=0.0),
    )
    axes.plot(range(len(depths)), means, color="white", marker="o", label="mean")
    axes.legend(loc="lower left", fontsize=8, facecolor="dimgrey", labelcolor="white")
    _tick_depths(axes, depths)
    _name(axes, title, "cosine of two tokens' states (no unit)")
    figure.colorbar(image, label=f"share of pairs per bin of {2.0 / histograms.shape[1]:.3g}")
    return figure


def _panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes: Axes = figure.subplots()
    return figure, axes


def _name(axes: Axes, title: str, ylabel: str) -> None:
    """Writes a panel's title and the labels of its axes, the lower one of which is depth."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(DEPTH)
    axes.set_ylabel(ylabel)


def _tick_depths(axes: Axes, depths: Sequence[int]) -> None:
    """Names equal steps along an axis by depth: all, or some where there are many."""
    shown = _named(range(len(depths)))
    axes.set_xticks(shown, [str(depths[i]) for i in shown])


def _named(values: Sequence[int]) -> Sequence[int]:
    """Returns so many of the values as fit an axis, the last one among them."""
    step = math.ceil(len(values) / _MOST_TICKS)
    return values[(len(values) - 1) % step :: step]
