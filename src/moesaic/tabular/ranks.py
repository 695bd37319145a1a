"""The distribution function of a sample, as a map to [0, 1] that handles ties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_QUANTILES = 1000


class RankMap:
    """Where a value stands in a sample: 0 at its smallest value or below, 1 at its largest or above.

    Between the quantiles (1000 evenly spaced order statistics, or all of a smaller sample) it interpolates. A value
    that the sample holds several times gets the middle of the ranks it covers, except at the two ends. Quantiles are
    values of the sample, never a mean of two: rounding would tear ties apart.
    """

    def fit(self, sample: Vector) -> RankMap:
        """Learn from a sample (n,) of finite values, n >= 1."""
        size = min(_QUANTILES, len(sample))
        picked = np.round(np.linspace(0, len(sample) - 1, size)).astype(np.int64)
        self.quantiles = np.sort(sample)[picked]
        self.ranks = np.linspace(0.0, 1.0, size)
        return self

    def transform(self, values: Vector) -> Vector:
        """Ranks in [0, 1], of the same shape."""
        # On a tie interpolation takes the last rank from the left and the first one from the right.
        upper = np.interp(values, self.quantiles, self.ranks)
        lower = -np.interp(-values, -self.quantiles[::-1], -self.ranks[::-1])
        ranks = 0.5 * (upper + lower)
        ranks[values >= self.quantiles[-1]] = 1.0
        ranks[values <= self.quantiles[0]] = 0.0
        return np.asarray(ranks)
