"""Labelled tables for anomaly detection, and the one-class split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesaic.data.download import fetch, registry

Matrix = NDArray[np.float64]
_FOLDER = "tabular"


@dataclass(frozen=True)
class Table:
    """A labelled table.

    Args:
        name: the data set's name.
        rows: (n, d) float64 features.
        labels: (n,) int64, 1 for an anomaly, 0 for a normal row.
    """

    name: str
    rows: Matrix
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class OneClassSplit:
    """Normal rows to learn from, and the rows to judge.

    Args:
        context: (c, d) normal rows.
        test: (t, d) the other normal rows and all anomalies.
        test_labels: (t,) 1 for an anomaly.
        context_ids: (c,) their row numbers in the table.
        test_ids: (t,) likewise; the two are disjoint.
    """

    context: Matrix
    test: Matrix
    test_labels: NDArray[np.int64]
    context_ids: NDArray[np.int64]
    test_ids: NDArray[np.int64]


def table_names() -> list[str]:
    """Names that :func:`load_table` knows, sorted."""
    return sorted(Path(name).stem for name in registry() if name.startswith(f"{_FOLDER}/"))


def load_table(name: str) -> Table:
    """Fetch and read one anomaly-detection table (ADBench, arXiv:2206.09426, and a few of ODDS and UCI).

    Args:
        name: one of :func:`table_names`, such as ``"wine"``.

    Raises:
        ValueError: an unknown name; a file that does not hold a labelled table.
        ImportError: a MATLAB file without scipy.
    """
    files = {Path(file).stem: file for file in registry() if file.startswith(f"{_FOLDER}/")}
    if name not in files:
        raise ValueError(f"name is {name!r}; known tables are {', '.join(table_names())}")
    return read_table(fetch(files[name]), name)


def read_table(path: Path, name: str | None = None) -> Table:
    """Read a labelled table from an ``.npz`` or ``.mat`` file with the arrays ``X`` and ``y``.

    Raises:
        ValueError: another kind of file, missing arrays, lengths that differ, labels other than 0 and 1.
        ImportError: a MATLAB file without scipy.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in ("X", "y") if key in arrays}
    elif path.suffix == ".mat":
        found = _read_matlab(path)
    else:
        raise ValueError(f"path is {path}; its suffix must be .npz or .mat")
    if set(found) != {"X", "y"}:
        raise ValueError(f"{path} must hold the arrays X and y, found {sorted(found)}")
    rows, labels = np.asarray(found["X"], dtype=np.float64), np.asarray(found["y"]).reshape(-1).astype(np.int64)
    if rows.ndim != 2 or rows.shape[0] != labels.shape[0]:
        raise ValueError(f"{path}: X has shape {rows.shape} and y {labels.shape}; X must be (n, d) and y (n,)")
    if not set(np.unique(labels)) <= {0, 1}:
        raise ValueError(f"{path}: y holds {np.unique(labels)[:5].tolist()}; it must hold 0 (normal) and 1 (anomaly)")
    return Table(name or path.stem, rows, labels)


def one_class_split(table: Table, *, shuffle: bool = False, seed: int = 0) -> OneClassSplit:
    """First half of the normal rows as context; the rest of them and every anomaly as test (arXiv:2603.14407).

    Args:
        table: the table.
        shuffle: draw the context at random instead of taking the first rows of the file.
        seed: of that draw.

    Raises:
        ValueError: fewer than four normal rows or no anomaly.
    """
    normal, anomalous = np.flatnonzero(table.labels == 0), np.flatnonzero(table.labels == 1)
    if len(normal) < 4 or len(anomalous) < 1:
        raise ValueError(
            f"{table.name} has {len(normal)} normal rows and {len(anomalous)} anomalies; a split needs 4 and 1"
        )
    if shuffle:
        normal = np.random.default_rng(seed).permutation(normal)
    half = len(normal) // 2
    context_ids, test_ids = normal[:half], np.concatenate([normal[half:], anomalous])
    return OneClassSplit(table.rows[context_ids], table.rows[test_ids], table.labels[test_ids], context_ids, test_ids)


def _read_matlab(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f'reading {path.name} needs scipy: pip install "moesaic[tabular]"') from error
    return {key: value for key, value in loadmat(path).items() if key in ("X", "y")}
