"""Pseudo-anomalies: points that lie off the normal rows, made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import KMeans

Matrix = NDArray[np.float64]
Ids = NDArray[np.int64]


class PseudoAnomalySampler:
    r"""Five generators, an equal share of points from each (arXiv:2603.14407).

    ``extrapolation``: :math:`x_b + a (x_b - x_a)`, a ~ U(1, 2), beyond a random pair of rows.
    ``interpolation``: :math:`b x_a + (1 - b) x_b`, b ~ U(0, 1), between rows of different k-means clusters.
    ``uniform``: in the box of the columns' smallest and largest values.
    ``gaussian``: the columns' means plus ``gaussian_alpha`` times their standard deviations times normal noise.
    ``masking``: a row with each entry set to 0 with probability ``mask_prob``.

    Args:
        strategies: which of them, in any order.
        mask_prob: chance of an entry to be masked, in [0, 1].
        gaussian_alpha: scale of the Gaussian noise, at least 0.

    Raises:
        ValueError: an unknown or no strategy, a parameter outside its range.
    """

    def __init__(
        self,
        strategies: Sequence[str] = ("extrapolation", "interpolation", "uniform", "gaussian", "masking"),
        mask_prob: float = 0.1,
        gaussian_alpha: float = 1.0,
    ) -> None:
        self._generators: dict[str, Callable[[Matrix, int, np.random.Generator], Matrix]] = {
            "extrapolation": _extrapolate,
            "interpolation": _interpolate,
            "uniform": _uniform,
            "gaussian": self._gaussian,
            "masking": self._mask,
        }
        unknown = [name for name in strategies if name not in self._generators]
        if unknown or not strategies:
            raise ValueError(f"strategies is {tuple(strategies)}; it must name some of {tuple(self._generators)}")
        if not 0.0 <= mask_prob <= 1.0:
            raise ValueError(f"mask_prob is {mask_prob}; it must lie in [0, 1]")
        if gaussian_alpha < 0.0:
            raise ValueError(f"gaussian_alpha is {gaussian_alpha}; it must be at least 0")
        self.strategies, self.mask_prob, self.gaussian_alpha = tuple(strategies), mask_prob, gaussian_alpha

    def sample(self, rows: ArrayLike, n: int, rng: np.random.Generator) -> Matrix:
        """Exactly n points (n, d) made from rows (t, d), shuffled.

        Args:
            rows: normal rows, at least 2.
            n: number of points, at least 1.
            rng: source of all randomness.

        Raises:
            ValueError: too few rows, n below 1.
        """
        rows_TD = np.asarray(rows, dtype=np.float64)
        if rows_TD.ndim != 2 or len(rows_TD) < 2:
            raise ValueError(f"rows has shape {rows_TD.shape}; it must be (t, d) with t >= 2")
        if n < 1:
            raise ValueError(f"n is {n}; at least 1 point must be asked for")
        share = ceil(n / len(self.strategies))
        points = np.concatenate([self._generators[name](rows_TD, share, rng) for name in self.strategies])
        return points[rng.permutation(len(points))[:n]]

    def _gaussian(self, rows_TD: Matrix, n: int, rng: np.random.Generator) -> Matrix:
        spread_D = rows_TD.std(0)
        spread_D[spread_D == 0] = 1.0
        noise_TD = self.gaussian_alpha * spread_D * rng.standard_normal((n, rows_TD.shape[1]))
        return np.asarray(rows_TD.mean(0) + noise_TD)

    def _mask(self, rows_TD: Matrix, n: int, rng: np.random.Generator) -> Matrix:
        picked = rows_TD[rng.integers(len(rows_TD), size=n)]
        picked[rng.random(picked.shape) < self.mask_prob] = 0.0
        return picked


def _extrapolate(rows_TD: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    a, b = _pairs(len(rows_TD), n, rng)
    return rows_TD[b] + rng.uniform(1.0, 2.0, size=(n, 1)) * (rows_TD[b] - rows_TD[a])


def _interpolate(rows_TD: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    a, b = _pairs_across_clusters(rows_TD, n, rng)
    weight = rng.random((n, 1))
    return weight * rows_TD[a] + (1.0 - weight) * rows_TD[b]


def _uniform(rows_TD: Matrix, n: int, rng: np.random.Generator) -> Matrix:
    return rng.uniform(rows_TD.min(0), rows_TD.max(0), size=(n, rows_TD.shape[1]))


def _pairs(rows: int, n: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Random ordered pairs of different rows."""
    first = rng.integers(rows, size=n)
    return first, (first + rng.integers(1, rows, size=n)) % rows


def _pairs_across_clusters(
    rows_TD: Matrix, n: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs from different clusters; random pairs where the table is too small or too uniform to have clusters."""
    distinct = len(np.unique(rows_TD, axis=0))
    clusters = min(5, len(rows_TD) // 20, distinct)
    if len(rows_TD) <= 50 or clusters < 2:
        return _pairs(len(rows_TD), n, rng)
    labels = KMeans(clusters, n_init=1, random_state=int(rng.integers(2**31))).fit_predict(rows_TD)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=clusters)
    starts = np.cumsum(sizes) - sizes
    first = rng.integers(len(rows_TD), size=n)
    own = labels[first]
    # Position among the rows of all other clusters: jump over the own block of the sorted order.
    place = (rng.random(n) * (len(rows_TD) - sizes[own])).astype(np.int64)
    return first, order[np.where(place < starts[own], place, place + sizes[own])]
