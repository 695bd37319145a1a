"""Exact nearest-neighbour search behind one small contract, in chunks of queries."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

Matrix = NDArray[np.float64]
Ids = NDArray[np.int64]

# Largest number of floats that one chunk of a search may form (64 MB in float64).
_CHUNK_FLOATS = 8_000_000


class NeighbourIndex(ABC):
    """Euclidean neighbours of queries among fixed rows.

    Distances are invariant to a shift, so rows are stored minus their mean: the expansion |x|^2 - 2xy + |y|^2, by which
    blocks of distances are computed fast, then loses least. Distances of the rows found are computed again from
    differences, hence 0 between equal rows, and rounded to float32's 24 bits: distances that are equal but for rounding
    become equal, which matters where they are ranked (tables of small integers have few different distances).
    """

    def fit(self, rows_TD: Matrix) -> NeighbourIndex:
        """Store the rows to search among, (n, d)."""
        self.center_D = rows_TD.mean(0)
        self.rows_TD = rows_TD - self.center_D
        self._build()
        return self

    def query(self, rows_TD: Matrix, k: int) -> tuple[Matrix, Ids]:
        """The k nearest stored rows of each query.

        Args:
            rows_TD: (n, d) queries.
            k: at least 1, at most the number of stored rows.

        Returns:
            Distances (n, k), ascending, and row numbers (n, k).
        """
        if not 1 <= k <= len(self.rows_TD):
            raise ValueError(f"k is {k}; it must lie in 1..{len(self.rows_TD)}, the number of stored rows")
        distance_TK = np.empty((len(rows_TD), k))
        ids_TK = np.empty((len(rows_TD), k), dtype=np.int64)
        step = max(1, _CHUNK_FLOATS // (k * self.rows_TD.shape[1]))
        for start in range(0, len(rows_TD), step):
            chunk = slice(start, start + step)
            centred_TD = rows_TD[chunk] - self.center_D
            found_TK = self._search(centred_TD, k)
            difference_TKD = self.rows_TD[found_TK] - centred_TD[:, None, :]
            squared_TK = np.einsum("tkd,tkd->tk", difference_TKD, difference_TKD)
            order_TK = np.argsort(squared_TK, axis=1, kind="stable")
            distance_TK[chunk] = _rounded(np.sqrt(np.take_along_axis(squared_TK, order_TK, 1)))
            ids_TK[chunk] = np.take_along_axis(found_TK, order_TK, 1)
        return distance_TK, ids_TK

    @abstractmethod
    def _build(self) -> None:
        """Prepare the search over ``self.rows_TD``."""

    @abstractmethod
    def _search(self, centred_TD: Matrix, k: int) -> Ids:
        """Row numbers (n, k) of the k nearest stored rows, in any order."""


class SklearnIndex(NeighbourIndex):
    """scikit-learn's search: a k-d tree for narrow tables, blocks of distances for wide ones.

    Args:
        n_jobs: threads of the tree search; the blocks use all cores of the process.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        self.n_jobs = n_jobs

    def _build(self) -> None:
        self.search = NearestNeighbors(algorithm="auto", n_jobs=self.n_jobs).fit(self.rows_TD)

    def _search(self, centred_TD: Matrix, k: int) -> Ids:
        return np.asarray(self.search.kneighbors(centred_TD, n_neighbors=k, return_distance=False), dtype=np.int64)


class TorchIndex(NeighbourIndex):
    """Blocks of distances by :func:`torch.cdist`.

    Args:
        device: where to compute, such as ``"cuda"``.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def _build(self) -> None:
        self.stored_TD = torch.from_numpy(self.rows_TD).to(self.device)

    def _search(self, centred_TD: Matrix, k: int) -> Ids:
        queries_TD = torch.from_numpy(np.ascontiguousarray(centred_TD)).to(self.device)
        step = max(1, _CHUNK_FLOATS // len(self.stored_TD))
        found = [
            torch.cdist(part, self.stored_TD).topk(k, largest=False).indices for part in torch.split(queries_TD, step)
        ]
        return torch.cat(found).cpu().numpy()


class FaissIndex(NeighbourIndex):
    """faiss' flat index. It searches in float32, so rows that differ by less than its rounding may change places.

    Raises:
        ImportError: faiss is not installed.
    """

    def __init__(self) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError('backend "faiss" needs faiss: pip install faiss-cpu') from error
        self.faiss = faiss

    def __getstate__(self) -> dict[str, object]:
        return {"center_D": self.center_D, "rows_TD": self.rows_TD}

    def __setstate__(self, state: dict[str, Matrix]) -> None:
        FaissIndex.__init__(self)
        self.center_D, self.rows_TD = state["center_D"], state["rows_TD"]
        self._build()

    def _build(self) -> None:
        self.search = self.faiss.IndexFlatL2(self.rows_TD.shape[1])
        self.search.add(self.rows_TD.astype(np.float32))

    def _search(self, centred_TD: Matrix, k: int) -> Ids:
        return np.asarray(self.search.search(centred_TD.astype(np.float32), k)[1], dtype=np.int64)


BACKENDS = ("sklearn", "torch", "faiss")


def make_index(backend: str, n_jobs: int | None = None) -> NeighbourIndex:
    """An empty index.

    Args:
        backend: one of ``BACKENDS``.
        n_jobs: threads, where the backend takes them.

    Raises:
        ValueError: another backend.
        ImportError: the backend's package is missing.
    """
    if backend == "sklearn":
        return SklearnIndex(n_jobs)
    if backend == "torch":
        return TorchIndex()
    if backend == "faiss":
        return FaissIndex()
    raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS}")


def _rounded(values: Matrix) -> Matrix:
    """Values with 24 significant bits at any exponent of float64."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**24) * 2.0**-24, exponent))
