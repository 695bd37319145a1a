"""How well scores rank anomalies, and the one threshold rule of the paper."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score


def auroc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve: the chance that an anomaly scores above a normal row, ties counting half.

    Args:
        labels: (n,) 1 for an anomaly, 0 for a normal row; both must occur.
        scores: (n,) larger is more anomalous.

    Raises:
        ValueError: lengths that differ, other labels, one class only, scores that are not finite.
    """
    return float(roc_auc_score(*_checked(labels, scores)))


def auprc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Average precision, the area under the precision-recall steps; arguments of :func:`auroc`."""
    return float(average_precision_score(*_checked(labels, scores)))


def f1_at_known_rate(labels: ArrayLike, scores: ArrayLike) -> float:
    """F1 when as many rows are flagged as the labels say (arXiv:2603.14407); arguments of :func:`auroc`.

    The threshold is the percentile 100 * (share of normal rows) of the scores, strictly exceeded. It uses the rate of
    the test labels, so it compares rankings and is not what a user gets; :func:`f1_at_threshold` is.
    """
    truth, values = _checked(labels, scores)
    threshold = np.percentile(values, 100.0 * float(np.mean(truth == 0)))
    return float(f1_score(truth, values > threshold, zero_division=0.0))


def f1_at_threshold(labels: ArrayLike, scores: ArrayLike, threshold: float) -> float:
    """F1 of ``scores > threshold``, a threshold fixed without the labels; other arguments of :func:`auroc`."""
    truth, values = _checked(labels, scores)
    return float(f1_score(truth, values > threshold, zero_division=0.0))


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    truth, values = np.asarray(labels), np.asarray(scores, dtype=np.float64)
    if truth.ndim != 1 or truth.shape != values.shape:
        raise ValueError(f"labels have shape {truth.shape} and scores {values.shape}; both must be (n,)")
    found = set(np.unique(truth).tolist())
    if found != {0, 1}:
        raise ValueError(f"labels hold {sorted(found)[:5]}; both 0 (normal) and 1 (anomaly) must occur, nothing else")
    if not np.isfinite(values).all():
        raise ValueError(f"scores hold {values[~np.isfinite(values)][0]}; they must be finite")
    return truth.astype(np.int64), values
