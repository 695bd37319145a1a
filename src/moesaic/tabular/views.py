"""Column transformations that give one table several geometries: the views whose neighbour distances are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from moesaic.tabular.ranks import RankMap

Matrix = NDArray[np.float64]
Exponents = NDArray[np.signedinteger[Any]]

# Squares of values below this bound, summed over any width, stay finite.
_LARGEST = 1e150
# Beside a largest value near 1 this is 0; slopes between such values would overflow.
_SMALLEST = 1e-100
# Ranks nearer to 0 or 1 than this are taken for it, as in scikit-learn's QuantileTransformer.
_TAIL = 1e-7


class View(ABC):
    """A transformation fitted on the context rows alone; every column on its own.

    Values of any finite size are accepted: columns are scaled by powers of two first, which is exact, and rows far
    outside the context are clipped at 1e150 so that their distances stay finite.
    """

    def fit(self, context_TD: Matrix) -> View:
        """Learn the transformation from context rows (n, d)."""
        self.exponent_D = self._exponents(context_TD)
        self._fit(self._scaled(context_TD))
        return self

    def transform(self, rows_TD: Matrix) -> Matrix:
        """Rows in this view's space, (n, d) float64."""
        with np.errstate(over="ignore"):
            out = self._transform(self._scaled(rows_TD))
        return np.clip(out, -_LARGEST, _LARGEST, out=out)

    def _exponents(self, context_TD: Matrix) -> Exponents:
        exponent_D: Exponents = np.frexp(np.abs(context_TD).max(0))[1]
        return exponent_D

    def _scaled(self, rows_TD: Matrix) -> Matrix:
        with np.errstate(over="ignore"):
            scaled_TD = np.clip(np.ldexp(rows_TD, -self.exponent_D), -_LARGEST, _LARGEST)
        scaled_TD[np.abs(scaled_TD) < _SMALLEST] = 0.0
        return scaled_TD

    @abstractmethod
    def _fit(self, scaled_TD: Matrix) -> None:
        """Learn from scaled context rows."""

    @abstractmethod
    def _transform(self, scaled_TD: Matrix) -> Matrix:
        """A new array with the scaled rows transformed."""


class RawView(View):
    """The columns as they are, up to one power of two for all of them, which neighbour profiles do not see."""

    def _exponents(self, context_TD: Matrix) -> Exponents:
        exponent_1: Exponents = np.frexp(np.abs(context_TD).max(keepdims=True)[0])[1]
        return exponent_1

    def _fit(self, scaled_TD: Matrix) -> None:
        pass

    def _transform(self, scaled_TD: Matrix) -> Matrix:
        return scaled_TD


class StandardView(View):
    """Mean 0 and standard deviation 1 per column; a constant column is only centred."""

    def _fit(self, scaled_TD: Matrix) -> None:
        self.mean_D = scaled_TD.mean(0)
        self.scale_D = _or_one(scaled_TD.std(0), scaled_TD)

    def _transform(self, scaled_TD: Matrix) -> Matrix:
        return np.asarray((scaled_TD - self.mean_D) / self.scale_D)


class MinMaxView(View):
    """Smallest value 0 and largest value 1 per column; a constant column is only shifted."""

    def _fit(self, scaled_TD: Matrix) -> None:
        self.low_D = scaled_TD.min(0)
        self.range_D = _or_one(scaled_TD.max(0) - self.low_D, scaled_TD)

    def _transform(self, scaled_TD: Matrix) -> Matrix:
        return np.asarray((scaled_TD - self.low_D) / self.range_D)


class QuantileView(View):
    """Ranks mapped to a standard normal per column, at most 5.2 standard deviations out."""

    def _fit(self, scaled_TD: Matrix) -> None:
        self.maps = [RankMap().fit(column) for column in scaled_TD.T]

    def _transform(self, scaled_TD: Matrix) -> Matrix:
        ranks_TD = np.stack([rank.transform(column) for rank, column in zip(self.maps, scaled_TD.T)], axis=1)
        return np.asarray(ndtri(np.clip(ranks_TD, _TAIL, 1.0 - _TAIL)))


VIEWS: dict[str, type[View]] = {"raw": RawView, "std": StandardView, "minmax": MinMaxView, "quantile": QuantileView}


def _or_one(scale_D: Matrix, scaled_TD: Matrix) -> Matrix:
    """Divisors with 1 in constant columns, whose computed spread may be a rounding error instead of 0."""
    constant = scaled_TD.max(0) == scaled_TD.min(0)
    return np.where(constant | (scale_D == 0), 1.0, scale_D)
