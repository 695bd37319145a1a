"""Pictures of results, drawn without a display: once for a page of usual width, once for a phone.

A figure is laid out in CSS pixels: 96 of them an inch, as wide as the column of text that will show it, so that a text
of 9 points stays one. Each picture is stored at two device pixels a CSS pixel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moesaic.experiments.base import Experiment, Metric, Row, summarise

# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000", "#999933")
CSS_PER_INCH, DEVICE_PIXELS = 96, 2


@dataclasses.dataclass(frozen=True)
class Page:
    """A column of text that shows pictures.

    Args:
        suffix: what stands in the file's name before ``.png``.
        width: of the column in CSS pixels.
        columns: most panels beside each other.
    """

    suffix: str
    width: int
    columns: int


# The site's column is 688 CSS pixels wide on a desk, 736 on a tablet, and 358 on a phone of 390.
WIDE, NARROW = Page("", 688, 2), Page(".narrow", 358, 1)
PAGES = (WIDE, NARROW)
# 8.5 points are 11.3 CSS pixels: on a phone of 320 still 9.
STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "figure.titlesize": 9.0,
}
_page: ContextVar[Page] = ContextVar("page", default=WIDE)
_rows: ContextVar[str] = ContextVar("rows", default="")


@contextlib.contextmanager
def page(chosen: Page) -> Iterator[None]:
    """What is drawn in here is laid out for ``chosen``."""
    token = _page.set(chosen)
    try:
        with rc_context(STYLE):
            yield
    finally:
        _page.reset(token)


def figure(panels: int, *, height: float = 2.5, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    """An empty figure as wide as the page, and its panels, row by row.

    Args:
        panels: how many.
        height: of a panel in inches.
        columns: most panels beside each other; as many as the page holds by default. A phone holds one.
    """
    chosen = _page.get()
    across = min(panels, chosen.columns, columns or panels)
    down = math.ceil(panels / across)
    drawn = Figure(figsize=(chosen.width / CSS_PER_INCH, height * down), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = [drawn.add_subplot(down, across, index + 1) for index in range(panels)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return drawn, axes


def legend(drawn: Figure, panel: Axes) -> None:
    """The legend of ``panel``, for all panels: in the figure's free cell where there is one, else below."""
    handles, labels = panel.get_legend_handles_labels()
    spec = panel.get_gridspec()
    if spec is not None and len(drawn.axes) < spec.nrows * spec.ncols:
        cell = drawn.add_subplot(spec.nrows, spec.ncols, spec.nrows * spec.ncols)
        cell.axis("off")
        cell.legend(handles, labels, loc="center", frameon=False)
        return
    # As many columns as the widest label allows, at about 0.6 of the font's height a letter and a key of 40 pixels.
    longest = 40 + 7 * max((len(label) for label in labels), default=1)
    across = max(1, min(len(labels), int(_page.get().width // longest)))
    added = across and drawn.legend(handles, labels, loc="outside lower center", frameon=False, ncols=across)
    if added:  # room for it: a line of the legend is about 0.18 inches
        width, height = drawn.get_size_inches()
        drawn.set_size_inches(width, height + 0.18 * math.ceil(len(labels) / across))


def save(drawn: Figure, path: Path) -> None:
    """Write ``drawn`` as PNG without a date inside, so that equal rows give equal files."""
    facts = {"Software": None, **({"Rows": _rows.get()} if _rows.get() else {})}
    drawn.savefig(path, format="png", dpi=CSS_PER_INCH * DEVICE_PIXELS, metadata=facts)


def draw(experiment: Experiment, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write ``NAME.png`` and ``NAME.narrow.png``; nothing where there are no rows.

    Each file says in its text ``Rows`` from which rows it was drawn, see :func:`rows_digest`.
    """
    written = []
    token = _rows.set(rows_digest(rows))
    try:
        for chosen in PAGES if rows else ():
            path = folder / f"{experiment.name}{chosen.suffix}.png"
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            try:
                with page(chosen):
                    if experiment.plot is not None:
                        experiment.plot(rows, temporary)
                    else:
                        plot_means(experiment.metrics, rows, temporary, experiment.datasets)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            written.append(path)
    finally:
        _rows.reset(token)
    return written


def rows_digest(rows: Sequence[Row]) -> str:
    """Sixteen hexadecimal digits of what a picture can show of ``rows``."""
    what = [
        [row.arm, row.dataset, row.seed, dict(row.metrics), {k: list(v) for k, v in row.curves.items()}] for row in rows
    ]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def plot_means(metrics: Sequence[Metric], rows: Sequence[Row], path: Path, datasets: Sequence[str] = ()) -> None:
    """One panel a metric: mean over seeds with standard deviation, and every seed as a dot."""
    summary = summarise(rows, datasets)
    names = list(summary)
    drawn, axes = figure(len(metrics), height=0.7 + 0.28 * len(names))
    for panel, metric in zip(axes, metrics, strict=True):
        for index, name in enumerate(names):
            entry = summary[name].get(metric.name)
            if entry is None:
                continue
            colour = COLOURS[index % len(COLOURS)]
            panel.errorbar(entry["mean"], index, xerr=entry["std"], fmt="s", color=colour, capsize=3)
            seeds = [row.metrics[metric.name] for row in rows if row.arm == name and metric.name in row.metrics]
            panel.plot(seeds, [index + 0.2] * len(seeds), ".", color=colour, alpha=0.5)
        spec = panel.get_subplotspec()
        first = spec is None or spec.is_first_col()
        panel.set_yticks(range(len(names)), names if first else [])
        panel.invert_yaxis()
        panel.set_xlabel(metric.label + (f"\n({metric.better} is better)" if metric.better else ""))
    save(drawn, path)
