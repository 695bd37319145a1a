"""Sections of the anomaly report: scores, the highest rows with their columns, views."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from moesaic.analysis.report import Section
from moesaic.tabular.columns import Column
from moesaic.tabular.detector import OneForAllDetector
from moesaic.tabular.explain import Explanation

COLUMNS_SHOWN = 3


def anomaly_sections(
    detector: OneForAllDetector,
    table: Any,
    scores: NDArray[np.float64],
    explained: Sequence[int],
    why: Explanation,
) -> list[Section]:
    """The sections of a report on scored rows.

    Args:
        detector: fitted.
        table: data frame of the scored rows.
        scores: (n,) their anomaly scores.
        explained: positions of the rows that ``why`` explains, in its order, the highest score first.
        why: their explanations.
    """
    return [_scores(detector, scores), _rows(detector, table, scores, explained, why), _views(why)]


def _scores(detector: OneForAllDetector, scores: NDArray[np.float64]) -> Section:
    flagged = int((scores > detector.threshold_).sum())
    tiles = {
        "rows": f"{len(scores):,}",
        "flagged": f"{flagged:,} ({flagged / len(scores):.1%})",
        "threshold": f"{detector.threshold_:.3f}",
        "normal rows": f"{len(detector.decision_scores_):,}",
        "columns": f"{detector.n_features_in_:,}",
    }
    body = "".join(f'<div class="tile">{html.escape(k)}<b>{html.escape(v)}</b></div>' for k, v in tiles.items())
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    axes = figure.add_subplot()
    bins = np.linspace(0, 1, 51).tolist()
    for values, label, colour in (
        (detector.decision_scores_, "normal rows, each against the others", "#7a8ba8"),
        (scores, "scored rows", "#c8553d"),
    ):
        share = np.full(len(values), 1 / len(values))
        axes.hist(values, bins, weights=share, label=label, color=colour, alpha=0.6)
    axes.axvline(detector.threshold_, color="black", linewidth=1, linestyle="--", label="threshold")
    axes.set(xlabel="anomaly score", ylabel="share of rows", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    words = (
        "<p>A row is flagged when its score exceeds the threshold, which comes from the normal rows alone. Scores rank"
        " rows; they are no probabilities.</p>"
    )
    data = {"rows": len(scores), "flagged": flagged, "threshold": detector.threshold_}
    return Section("scores", "Scores", f'<div class="tiles">{body}</div>{words}', data, {"histogram": figure})


def _rows(
    detector: OneForAllDetector,
    table: Any,
    scores: NDArray[np.float64],
    explained: Sequence[int],
    why: Explanation,
) -> Section:
    left = ' style="text-align:left"'
    heads = f"<tr><th>row</th><th>score</th><th>flagged</th><th{left}>columns that left the neighbours</th></tr>"
    usual = {column.name: _usual(table[column.name], column) for column in detector.columns_.columns_}
    lines, data = [], []
    for place, row in enumerate(explained):
        top = why.top_columns(place, COLUMNS_SHOWN)
        cells = ", ".join(
            f"<b>{html.escape(name)}</b> = {html.escape(_brief(table.iloc[row][name]))}"
            f"{html.escape(usual.get(name, ''))} ({share:.0%})"
            for name, share in top
        )
        flagged = bool(scores[row] > detector.threshold_)
        lines.append(
            f"<tr><td>{row + 1}</td><td>{scores[row]:.3f}</td><td>{'yes' if flagged else 'no'}</td>"
            f"<td{left}>{cells or 'none in particular'}</td></tr>"
        )
        data.append({"row": row + 1, "score": float(scores[row]), "flagged": flagged, "columns": dict(top)})
    words = (
        f"<p>The {len(explained)} rows with the highest scores, counted from 1. In brackets: the column's share of what"
        " the row's distance from its neighbours exceeds the usual by.</p>"
    )
    body = f'{words}<div class="scroll"><table>{heads}{"".join(lines)}</table></div>'
    return Section("rows", "Highest rows", body, {"rows": data})


def _views(why: Explanation) -> Section:
    figure = why.plot(0)
    heads = "<tr><th>view</th><th>weight</th><th>score</th></tr>"
    weights, scores = why.view_weights.mean(0), why.view_scores.mean(0)
    lines = "".join(
        f"<tr><td>{name}</td><td>{weight:.2f}</td><td>{score:.3f}</td></tr>"
        for name, weight, score in zip(why.view_names, weights, scores)
    )
    words = (
        "<p>Each view transforms the columns in its own way and has its own expert; the gate weighs the experts row by"
        " row. Means over the rows above; the picture shows the highest of them.</p>"
    )
    data = {
        "weights": dict(zip(why.view_names, weights.tolist())),
        "scores": dict(zip(why.view_names, scores.tolist())),
    }
    return Section("views", "Which view spoke", f"{words}<table>{heads}{lines}</table>", data, {"highest": figure})


def _usual(values: Any, column: Column) -> str:
    """The normal rows' median or most frequent value, where it reads like the column itself."""
    if column.categories:
        return f", usually {_brief(column.categories[0])}"
    return f", usually {_brief(column.fill)}" if values.dtype.kind in "iuf" else ""


def _brief(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
