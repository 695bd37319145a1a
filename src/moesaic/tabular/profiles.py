"""Neighbour-distance profiles: what any two tables have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.formats.arguments import check_count
from moesaic.tabular.neighbours import BACKENDS, NeighbourIndex, make_index
from moesaic.tabular.ranks import RankMap
from moesaic.tabular.views import VIEWS, Matrix, View

Profile = NDArray[np.float32]

# Pooled distances beyond this number are thinned at even steps before the quantile map is fitted.
_POOLED = 10_000_000


class MultiViewDistanceEncoder:
    r"""Sorted distances to the nearest context rows, in several views, on the scale of the context's own distances.

    arXiv:2603.14407. In view m a row x has the distances :math:`d_1 \le \dots \le d_k` to its k nearest context rows,
    and its profile is

    .. math:: \hat d_j = F_m(d_j),

    with :math:`F_m` the distribution function of the distances among context rows, all ranks pooled, a row itself left
    out.

    Args:
        views: names out of ``VIEWS``.
        k: K, the neighbours of a profile; a context of n rows gives k = min(K, n - 1).
        backend: ``"sklearn"``, ``"torch"`` or ``"faiss"``.
        n_jobs: threads of the neighbour search, where the backend takes them.

    Shapes:
        rows (n, d) -> profile (n, M, k), float32 in [0, 1], ascending along k; M is the number of views (the axis E of
        the tensors' names: each view has its expert).

    Raises:
        ValueError: unknown or no views, k below 1, an unknown backend; later, rows that do not fit.
    """

    def __init__(
        self,
        views: Sequence[str] = ("raw", "std", "minmax", "quantile"),
        k: int = 80,
        backend: str = "sklearn",
        n_jobs: int | None = None,
    ) -> None:
        unknown = [name for name in views if name not in VIEWS]
        if unknown or not views:
            raise ValueError(f"views is {tuple(views)}; it must name at least one of {tuple(VIEWS)}")
        k = check_count("k", k)
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS}")
        self.views, self.k, self.backend, self.n_jobs = tuple(views), k, backend, n_jobs

    def fit(self, context: ArrayLike) -> MultiViewDistanceEncoder:
        """Learn views, neighbours and distance scales from context rows (n, d), n >= 2."""
        self.fit_context(context)
        return self

    def fit_context(self, context: ArrayLike) -> Profile:
        """:meth:`fit`, and the context's own profiles (n, M, k) from the same search, each row itself left out."""
        context_TD = self._rows(context, "context")
        if len(context_TD) < 2:
            raise ValueError(
                f"context has {len(context_TD)} row(s) (n_samples = {len(context_TD)}); at least 2 are needed"
            )
        self.k_ = min(self.k, len(context_TD) - 1)
        self.width_ = context_TD.shape[1]
        self.transforms_: list[View] = []
        self.indexes_: list[NeighbourIndex] = []
        self.scales_: list[RankMap] = []
        profile_TEK = np.empty((len(context_TD), len(self.views), self.k_), dtype=np.float32)
        for number, name in enumerate(self.views):
            view = VIEWS[name]().fit(context_TD)
            rows_TD = view.transform(context_TD)
            index = make_index(self.backend, self.n_jobs).fit(rows_TD)
            distance_TK = index.query(rows_TD, self.k_ + 1)[0][:, 1:]
            scale = _fit_scale(distance_TK)
            self.transforms_.append(view)
            self.indexes_.append(index)
            self.scales_.append(scale)
            for part in _chunks(len(context_TD)):
                profile_TEK[part, number] = _apply_scale(scale, distance_TK[part])
        return profile_TEK

    def context_profile(self) -> Profile:
        """The context's own profiles, each row itself left out; searches again, unlike :meth:`fit_context`."""
        self._fitted()
        columns = []
        for index, scale in zip(self.indexes_, self.scales_):
            distance_TK = index.query(index.rows_TD + index.center_D, self.k_ + 1)[0][:, 1:]
            columns.append(_apply_scale(scale, distance_TK))
        return np.stack(columns, axis=1)

    def transform(self, rows: ArrayLike, *, leave_out_equal: bool = False) -> Profile:
        """Profiles (n, M, k) of rows (n, d).

        Args:
            rows: the rows.
            leave_out_equal: one neighbour at distance 0 is taken for the row itself and left out, as it is for context
                rows. The paper compares new rows with all context rows, hence the default.
        """
        return self.profiles_of(self.to_views(rows), leave_out_equal=leave_out_equal)

    def to_views(self, rows: ArrayLike) -> list[Matrix]:
        """The rows in each view's space, M arrays (n, d)."""
        self._fitted()
        rows_TD = self._rows(rows, "rows")
        if rows_TD.shape[1] != self.width_:
            raise ValueError(f"rows have {rows_TD.shape[1]} columns, the context had {self.width_}")
        return [view.transform(rows_TD) for view in self.transforms_]

    def profiles_of(self, rows_by_view: Sequence[Matrix], *, leave_out_equal: bool = False) -> Profile:
        """Profiles (n, M, k) of points given in each view's space; see :meth:`transform`."""
        self._fitted()
        profile_TEK = np.empty((len(rows_by_view[0]), len(self.views), self.k_), dtype=np.float32)
        for number, (index, scale) in enumerate(zip(self.indexes_, self.scales_)):
            for part in _chunks(len(profile_TEK)):
                distance_TK = index.query(rows_by_view[number][part], self.k_ + leave_out_equal)[0]
                if leave_out_equal:
                    distance_TK = np.where(distance_TK[:, :1] == 0, distance_TK[:, 1:], distance_TK[:, :-1])
                profile_TEK[part, number] = _apply_scale(scale, distance_TK)
        return profile_TEK

    def neighbours(self, rows: ArrayLike, *, leave_out_equal: bool = False) -> Iterator[tuple[Matrix, Matrix]]:
        """Per view the rows in its space (n, d) and their neighbours there (n, k, d): for explaining a few rows."""
        for index, rows_TD in zip(self.indexes_, self.to_views(rows)):
            distance_TK, ids_TK = index.query(rows_TD, self.k_ + leave_out_equal)
            if leave_out_equal:
                ids_TK = np.where(distance_TK[:, :1] == 0, ids_TK[:, 1:], ids_TK[:, :-1])
            yield rows_TD, index.rows_TD[ids_TK] + index.center_D

    def _fitted(self) -> None:
        if not hasattr(self, "indexes_"):
            raise ValueError("this encoder has no context yet: call fit(context) first")

    @staticmethod
    def _rows(rows: ArrayLike, name: str) -> Matrix:
        rows_TD = np.asarray(rows, dtype=np.float64)
        if rows_TD.ndim != 2 or rows_TD.shape[1] < 1:
            raise ValueError(f"{name} has shape {rows_TD.shape}; it must be (n, d) with at least one column")
        if not np.isfinite(rows_TD).all():
            bad = np.argwhere(~np.isfinite(rows_TD))[0]
            raise ValueError(
                f"{name} holds {rows_TD[tuple(bad)]} in row {bad[0]}, column {bad[1]}; values must be finite"
            )
        return rows_TD


def _fit_scale(distance_TK: Matrix) -> RankMap:
    """The distribution function of all distances."""
    return RankMap().fit(distance_TK.reshape(-1)[:: 1 + distance_TK.size // _POOLED])


def _apply_scale(scale: RankMap, distance_TK: Matrix) -> Profile:
    return scale.transform(distance_TK).astype(np.float32)


def _chunks(rows: int, size: int = 8192) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, start + size)
