"""The detector behind PyOD's contract: scores that grow with anomaly, labels 0 and 1."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.tabular.detector import OneForAllDetector
from moesaic.tabular.network import GatedViewMoE

try:
    from pyod.models.base import BaseDetector
except ImportError as error:
    raise ImportError('moesaic.tabular.pyod_wrapper needs pyod: pip install "moesaic[tabular-peers]"') from error


class PyODOneForAll(BaseDetector):  # type: ignore[misc]
    """:class:`OneForAllDetector` as a PyOD detector.

    PyOD's signs are the opposite of scikit-learn's: ``decision_function`` grows with anomaly and ``predict`` gives 1
    for an anomaly and 0 for a normal row. Rows of ``fit`` are scored without themselves.

    Args:
        model: see :class:`OneForAllDetector`.
        contamination: share of the rows of ``fit`` above the threshold, in (0, 0.5].
        n_neighbors: see :class:`OneForAllDetector`.

    Attributes:
        detector_: the fitted :class:`OneForAllDetector`.
        decision_scores_, threshold_, labels_: as PyOD defines them.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | GatedViewMoE = "pretrained",
        contamination: float = 0.1,
        n_neighbors: int | None = None,
    ) -> None:
        super().__init__(contamination=contamination)
        self.model = model
        self.n_neighbors = n_neighbors

    def fit(self, X: Any, y: Any = None) -> PyODOneForAll:
        """Take the rows (n, d) as the context; ``y`` is ignored."""
        self._set_n_classes(y)
        self.detector_ = OneForAllDetector(self.model, n_neighbors=self.n_neighbors).fit(X)
        self.decision_scores_ = self.detector_.decision_scores_
        self._process_decision_scores()
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Anomaly scores (n,) in (0, 1) of new rows; larger is more anomalous."""
        return -self.detector_.score_samples(X)
