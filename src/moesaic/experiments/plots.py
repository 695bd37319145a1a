"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moesaic.experiments.base import Metric, Row, summarise

# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000", "#999933")


def figure(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """An empty figure with ``rows * columns`` panels, and the panels row by row."""
    drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = [drawn.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return drawn, axes


def save(drawn: Figure, path: Path) -> None:
    """Write ``drawn`` as PNG without a date inside, so that equal rows give equal files."""
    drawn.savefig(path, format="png", dpi=110, metadata={"Software": None})


def plot_means(metrics: Sequence[Metric], rows: Sequence[Row], path: Path) -> None:
    """One panel a metric: mean over seeds with standard deviation, and every seed as a dot."""
    summary = summarise(rows)
    names = list(summary)
    drawn, axes = figure(len(metrics), height=0.6 + 0.35 * len(names))
    for panel, metric in zip(axes, metrics, strict=True):
        for index, name in enumerate(names):
            entry = summary[name].get(metric.name)
            if entry is None:
                continue
            colour = COLOURS[index % len(COLOURS)]
            panel.errorbar(entry["mean"], index, xerr=entry["std"], fmt="s", color=colour, capsize=3)
            seeds = [row.metrics[metric.name] for row in rows if row.arm == name]
            panel.plot(seeds, [index + 0.2] * len(seeds), ".", color=colour, alpha=0.5)
        panel.set_yticks(range(len(names)), names if panel is axes[0] else [])
        panel.invert_yaxis()
        panel.set_xlabel(metric.label + (f" ({metric.better} is better)" if metric.better else ""))
    save(drawn, path)
