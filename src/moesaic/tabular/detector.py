"""A ready-made anomaly detector for any table."""

from __future__ import annotations

import copy
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from moesaic.formats.arguments import check_count
from moesaic.tabular.columns import TableEncoder
from moesaic.tabular.explain import Explanation, column_shares
from moesaic.tabular.network import GatedViewMoE, ViewScores
from moesaic.tabular.profiles import MultiViewDistanceEncoder, Profile
from moesaic.tabular.training import load_network, pretrain, pretrained_network, save_network

Vector = NDArray[np.float64]
Method = TypeVar("Method", bound=Callable[..., Any])

# Rows whose activations the network holds at once (K * D float64 values each, in a handful of arrays).
_BATCH_ROWS = 32


def _judges_new_rows(detector: OneForAllDetector) -> bool:
    if not detector.novelty:
        raise AttributeError(
            "predict, decision_function and score_samples judge new rows, which needs novelty=True (see fit_predict)"
        )
    return True


def _judges_fitted_rows(detector: OneForAllDetector) -> bool:
    if detector.novelty:
        raise AttributeError("fit_predict judges the rows of fit themselves: that needs novelty=False")
    return True


def _available_when(check: Callable[[Any], bool]) -> Callable[[Method], Method]:
    return cast("Callable[[Method], Method]", available_if(check))


class OneForAllDetector(OutlierMixin, BaseEstimator):  # type: ignore[misc]
    """Anomaly detection on any table with one model trained in advance (OFA-TAD, arXiv:2603.14407).

    Rows are compared with the normal rows given to ``fit``: how far they lie from their nearest neighbours, in four
    transformations of the columns, on the scale of the distances among the normal rows. A small network reads these
    profiles. It was trained on other tables, so ``fit`` trains nothing: it only remembers the normal rows.

    Data frames may hold missing values, dates, truth values and text with few different values; arrays may hold NaN.

    Args:
        model: ``"pretrained"`` (the network of this package), a path to one that :meth:`save_model` wrote, or a
            :class:`GatedViewMoE`.
        n_neighbors: length of the profiles; by default what the network can read, at most that.
        contamination: ``"auto"`` flags scores above those of 95 % of the normal rows and above 0.5; a share in (0, 0.5]
            flags that share of the rows given to ``fit``.
        novelty: True (default) judges new rows (``predict``, ``decision_function``, ``score_samples``); False judges
            the rows of ``fit`` themselves (``fit_predict``), as in scikit-learn's LocalOutlierFactor.
        leave_out_equal: True (default) does not compare a new row with an equal row of ``fit``, once, so that rows of
            ``fit`` get the scores they got there; False compares with all rows, as the paper does.
        backend: of the neighbour search: ``"sklearn"``, ``"torch"`` or ``"faiss"``.
        n_jobs: threads of the neighbour search, where the backend takes them.

    Attributes:
        decision_scores_: (n,) anomaly scores of the rows of ``fit`` in (0, 1), larger is more anomalous; each row is
            compared with the others, not with itself.
        threshold_: scores above it are anomalies.
        labels_: (n,) 1 where ``decision_scores_`` exceeds it, else 0.
        offset_: ``-threshold_``, scikit-learn's sign.
        n_features_in_, feature_names_in_: of ``fit``.

    Raises:
        ValueError: fewer than 2 rows, infinite values, text with many values, columns that differ from ``fit``'s.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> detector = OneForAllDetector().fit(rng.normal(size=(200, 3)))
        >>> detector.predict([[0.1, 0.2, 0.0], [6.0, -6.0, 6.0]])
        array([ 1, -1])
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | GatedViewMoE = "pretrained",
        *,
        n_neighbors: int | None = None,
        contamination: str | float = "auto",
        novelty: bool = True,
        leave_out_equal: bool = True,
        backend: str = "sklearn",
        n_jobs: int | None = None,
    ) -> None:
        self.model = model
        self.n_neighbors = n_neighbors
        self.contamination = contamination
        self.novelty = novelty
        self.leave_out_equal = leave_out_equal
        self.backend = backend
        self.n_jobs = n_jobs

    def pretrain(self, tables: Sequence[Any], **options: Any) -> OneForAllDetector:
        """Train the network anew on the normal rows of several tables, and use it from now on.

        Args:
            tables: data frames or arrays of normal rows; they may differ in columns.
            **options: of :func:`moesaic.tabular.pretrain`.

        Returns:
            The detector; its parameter ``model`` is the new network.
        """
        contexts = [TableEncoder().fit(table, _names(table)).transform(table) for table in tables]
        self.model = pretrain(contexts, **options)
        return self

    def fit(self, X: Any, y: Any = None) -> OneForAllDetector:
        """Take normal rows (n, d) as the context; ``y`` is ignored."""
        self._check_parameters()
        rows = self._table(X, reset=True)
        self.network_ = copy.deepcopy(self._network()).double().eval()
        self.columns_ = TableEncoder().fit(rows, self._column_names())
        self.context_ = self.columns_.transform(rows)
        config = self.network_.config
        self.encoder_ = MultiViewDistanceEncoder(
            config.views, self.n_neighbors or config.ranks, self.backend, self.n_jobs
        )
        self.decision_scores_ = self._score(self.encoder_.fit_context(self._finite(self.context_)))
        if self.contamination == "auto":
            self.threshold_ = max(0.5, float(np.quantile(self.decision_scores_, 0.95)))
        else:
            self.threshold_ = float(np.quantile(self.decision_scores_, 1.0 - float(self.contamination)))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(np.int64)
        self.offset_ = -self.threshold_
        return self

    @_available_when(_judges_new_rows)
    def score_samples(self, X: Any) -> Vector:
        """Scores of new rows (n,) in scikit-learn's sign: minus the anomaly score, so lower is more anomalous."""
        rows_TD = self._new_rows(X)
        return -self._score(self.encoder_.transform(rows_TD, leave_out_equal=self.leave_out_equal))

    @_available_when(_judges_new_rows)
    def decision_function(self, X: Any) -> Vector:
        """``score_samples(X) - offset_``: negative for anomalies."""
        return np.asarray(self.score_samples(X) - self.offset_)

    @_available_when(_judges_new_rows)
    def predict(self, X: Any) -> NDArray[np.int64]:
        """-1 for anomalies, 1 for normal rows."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    @_available_when(_judges_fitted_rows)
    def fit_predict(self, X: Any, y: Any = None) -> NDArray[np.int64]:
        """Fit, and -1 for the anomalies among the rows, 1 for the others."""
        return np.where(self.fit(X).labels_ == 1, -1, 1)

    def explain(self, X: Any) -> Explanation:
        """Which views and which columns speak for each row's score.

        Args:
            X: rows (n, d), a few hundred at most, as neighbours are looked up in full.
        """
        rows_TD = self._new_rows(X)
        out = self._forward(self.encoder_.transform(rows_TD, leave_out_equal=self.leave_out_equal))
        weights_TE, scores_TE = out.routing.weights_TE.numpy(), out.logits_TE.sigmoid().numpy()
        share_TE = weights_TE * scores_TE
        share_TE = share_TE / share_TE.sum(1, keepdims=True)
        attention_TEK = out.attention_TEK.numpy()
        encoded = column_shares(
            self.encoder_, self.context_, rows_TD, attention_TEK, share_TE, leave_out_equal=self.leave_out_equal
        )
        columns = np.zeros((len(rows_TD), self.n_features_in_))
        np.add.at(columns.T, self.columns_.sources_, encoded.T)
        return Explanation(
            out.score_T.numpy(), self.network_.config.views, weights_TE, scores_TE, tuple(self._column_names()), columns
        )

    def save_model(self, path: str | os.PathLike[str]) -> None:
        """Write the network (not the context) to a file that ``model=path`` reads."""
        save_network(self._network(), path)

    def _check_parameters(self) -> None:
        share = self.contamination
        if share != "auto" and not (isinstance(share, numbers.Real) and 0.0 < float(share) <= 0.5):
            raise ValueError(f'contamination is {share!r}; it must be "auto" or a share in (0, 0.5]')
        if self.n_neighbors is not None:
            check_count("n_neighbors", self.n_neighbors)

    def _network(self) -> GatedViewMoE:
        if isinstance(self.model, GatedViewMoE):
            network = self.model
        else:
            network = pretrained_network() if self.model == "pretrained" else load_network(self.model)
        if self.n_neighbors is not None and self.n_neighbors > network.config.ranks:
            raise ValueError(f"n_neighbors is {self.n_neighbors}; this network reads at most {network.config.ranks}")
        return network

    def _table(self, X: Any, *, reset: bool) -> Any:
        """A frame as it is, anything else as a float array with NaN where missing; width and names checked."""
        if hasattr(X, "iloc") and hasattr(X, "columns"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if len(X) < (2 if reset else 1) or X.shape[1] < 1:
                raise ValueError(f"X has shape {X.shape}; at least {2 if reset else 1} row(s) and 1 column are needed")
            return X
        return validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2 if reset else 1
        )

    def _column_names(self) -> list[str]:
        names = getattr(self, "feature_names_in_", None)
        return [f"x{c}" for c in range(self.n_features_in_)] if names is None else [str(name) for name in names]

    def _new_rows(self, X: Any) -> Vector:
        check_is_fitted(self)
        return self._finite(self.columns_.transform(self._table(X, reset=False)))

    def _finite(self, rows_TD: Vector) -> Vector:
        bad = np.argwhere(~np.isfinite(rows_TD))
        if len(bad):
            row, column = bad[0]
            name = self._column_names()[self.columns_.sources_[column]]
            raise ValueError(
                f"X holds {rows_TD[row, column]} in row {row} (the first is 0), column {name!r}; give finite values,"
                " or NaN for missing"
            )
        return rows_TD

    def _forward(self, profile_TEK: Profile) -> ViewScores:
        with torch.no_grad():
            out: ViewScores = self.network_(torch.from_numpy(profile_TEK).double())
        return out

    def _score(self, profile_TEK: Profile) -> Vector:
        # float64, so that a row's score does not depend on the rows beside it.
        parts = [
            self._forward(profile_TEK[start : start + _BATCH_ROWS]).score_T
            for start in range(0, len(profile_TEK), _BATCH_ROWS)
        ]
        return torch.cat(parts).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _names(table: Any) -> list[str]:
    if hasattr(table, "columns"):
        return [str(name) for name in table.columns]
    return [f"x{c}" for c in range(np.asarray(table).shape[1])]
