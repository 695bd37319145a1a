"""A figure laid out again for a phone: panels under each other, as wide as the column, in letters of the same size."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import MaxNLocator

CSS_PER_INCH = 96
# The column of a report on a phone of 390 CSS pixels.
COLUMN = 358
MOST_TICKS = 8  # labels of two digits that fit beside each other


def lay_out_narrow(figure: Figure) -> None:
    """Change ``figure`` in place: ``COLUMN`` CSS pixels wide, one panel a line, each as high as it was.

    A text of 9 points is then 12 CSS pixels high where the picture is shown as wide as it is.
    """
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    heights = [_inches_high(axes) for axes in panels]
    figure.set_layout_engine("constrained")
    grid = GridSpec(len(panels), 1, figure=figure, height_ratios=heights)
    for place, axes in enumerate(panels):
        axes.set_subplotspec(grid[place])
        if len(axes.get_xticks()) > MOST_TICKS and axes.get_xscale() == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True))
        title = axes.get_title()
        if len(title) > 24:  # wider than a panel in the letters of a title
            axes.set_title(title, fontsize=10, wrap=True)
    figure.set_size_inches(COLUMN / CSS_PER_INCH, sum(heights))


def _inches_high(axes: Axes) -> float:
    """The panel's height with its labels: its share of the figure's lines."""
    figure = axes.get_figure(root=True)
    spec = axes.get_subplotspec()
    assert figure is not None
    lines = 1 if spec is None else spec.get_gridspec().nrows
    return max(float(figure.get_size_inches()[1]) / lines, 1.8)
