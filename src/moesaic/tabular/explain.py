"""Why a row got its score: the views that spoke, and the columns in which the row left its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.tabular.profiles import MultiViewDistanceEncoder

Matrix = NDArray[np.float64]

# Context rows from which the usual distances per column are estimated.
_TYPICAL_ROWS = 512


@dataclass(frozen=True)
class Explanation:
    """Scores taken apart, one entry per explained row.

    Args:
        score: (n,) anomaly scores in (0, 1).
        view_names: the M views.
        view_weights: (n, M) what the gate weighs the views with; rows sum to 1.
        view_scores: (n, M) each view's own score in (0, 1).
        column_names: the table's d columns.
        columns: (n, d) share of each column in the row's distance from its neighbours beyond what is usual among
            context rows; rows sum to 1, or to 0 where no column is unusual.
    """

    score: Matrix
    view_names: tuple[str, ...]
    view_weights: Matrix
    view_scores: Matrix
    column_names: tuple[str, ...]
    columns: Matrix

    def top_columns(self, row: int, n: int = 3) -> list[tuple[str, float]]:
        """The n columns with the largest shares in a row, largest first, without those that have none."""
        order = np.argsort(-self.columns[row], kind="stable")[:n]
        return [(self.column_names[c], float(self.columns[row, c])) for c in order if self.columns[row, c] > 0]

    def to_frame(self) -> Any:
        """A pandas data frame: score, ``weight:VIEW``, ``score:VIEW`` and ``column:NAME``, one line a row."""
        import pandas as pd

        values = {"score": self.score}
        values |= {f"weight:{name}": self.view_weights[:, m] for m, name in enumerate(self.view_names)}
        values |= {f"score:{name}": self.view_scores[:, m] for m, name in enumerate(self.view_names)}
        values |= {f"column:{name}": self.columns[:, c] for c, name in enumerate(self.column_names)}
        return pd.DataFrame(values)

    def plot(self, row: int = 0, *, columns: int = 10, axes: Any = None) -> Any:
        """Two bar charts of one row: views (weight and score) and the columns with the largest shares.

        Args:
            row: which of the explained rows.
            columns: how many columns to show.
            axes: two matplotlib axes to draw on; a new figure by default.

        Returns:
            The matplotlib figure.
        """
        from matplotlib.figure import Figure

        if axes is None:
            axes = Figure(figsize=(9, 3.2), layout="constrained").subplots(1, 2)
        left, right = axes
        place = np.arange(len(self.view_names))
        left.barh(place + 0.2, self.view_weights[row], 0.4, label="weight (gate)", color="#7a8ba8")
        left.barh(place - 0.2, self.view_scores[row], 0.4, label="score of the view", color="#c8553d")
        left.set_yticks(place, self.view_names)
        left.invert_yaxis()
        left.set_xlim(0, 1)
        left.set_title(f"score {self.score[row]:.2f}: which view")
        left.legend(loc="lower right", frameon=False, fontsize="small")
        top = self.top_columns(row, columns)
        right.barh([name for name, _ in top], [share for _, share in top], color="#c8553d")
        right.invert_yaxis()
        right.set_xlim(0, 1)
        right.set_title("which columns (share of the unusual distance)")
        return left.figure


def column_shares(
    encoder: MultiViewDistanceEncoder,
    context_TD: Matrix,
    rows_TD: Matrix,
    attention_TEK: NDArray[np.floating[Any]],
    view_share_TE: Matrix,
    *,
    leave_out_equal: bool = True,
) -> Matrix:
    r"""Share of each encoded column in a row's unusual distance.

    In view m the squared distances to the neighbours, weighted by the attention :math:`\alpha`, split over columns:
    :math:`q_c = \sum_j \alpha_j (x_c - n_{jc})^2`. What exceeds the mean of the same among context rows is the column's
    excess; shares of excesses are averaged over views with ``view_share_TE``.

    Args:
        encoder: fitted.
        context_TD: its context rows.
        rows_TD: the rows to explain.
        attention_TEK: (T, E, K) pooling weights of these rows.
        view_share_TE: (T, E) how much each view speaks.
        leave_out_equal: of :meth:`MultiViewDistanceEncoder.transform`, as the rows were scored.

    Returns:
        (T, d), each row summing to 1 or 0.
    """
    sample = np.unique(np.linspace(0, len(context_TD) - 1, min(len(context_TD), _TYPICAL_ROWS)).astype(np.int64))
    typical = encoder.neighbours(context_TD[sample], leave_out_equal=True)
    here = encoder.neighbours(rows_TD, leave_out_equal=leave_out_equal)
    total_TD = np.zeros_like(rows_TD)
    for e, ((usual_TD, usual_TKD), (here_TD, here_TKD)) in enumerate(zip(typical, here)):
        usual_D = np.square(usual_TKD - usual_TD[:, None]).mean(axis=(0, 1))
        gap_TD = np.einsum("tk,tkd->td", attention_TEK[:, e], np.square(here_TKD - here_TD[:, None]))
        total_TD += view_share_TE[:, e, None] * _shares(np.maximum(gap_TD - usual_D, 0.0))
    return _shares(total_TD)


def _shares(values_TD: Matrix) -> Matrix:
    largest_T = values_TD.max(1, keepdims=True)
    scaled_TD = values_TD / np.where(largest_T > 0, largest_T, 1.0)
    total_T = scaled_TD.sum(1, keepdims=True)
    return np.asarray(scaled_TD / np.where(total_T > 0, total_T, 1.0))
