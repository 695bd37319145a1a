"""From a table as people have it to numbers: missing values, text, dates, truth values."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_MAX_CATEGORIES = 20


@dataclass(frozen=True)
class Column:
    """How one column becomes numbers.

    Args:
        name: its name.
        fill: median of the context, in place of missing numbers.
        had_missing: the context had missing values, so a 0/1 column says where.
        categories: of a text column, most frequent first; empty for a number.
    """

    name: str
    fill: float = 0.0
    had_missing: bool = False
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Number of columns that it becomes."""
        return (len(self.categories) or 1) + self.had_missing


class TableEncoder:
    """Columns to numbers, learnt from the context alone.

    A number stays as it is; a missing one becomes the context's median. Dates become seconds, truth values 0 and 1.
    Text with at most 20 different values becomes one column per value, so that two different values lie at distance 1,
    as do a missing and a present one; a value that the context lacks lies at 0.7 from all of them. Text with more
    values (names, free text, identifiers) is refused.
    """

    def fit(self, table: Any, names: Sequence[str]) -> TableEncoder:
        """Learn from a table (a data frame or a float array, NaN where missing) whose columns have these names.

        Raises:
            ValueError: text columns with too many different values.
        """
        self.columns_ = [_learn(name, values) for name, values in zip(names, _columns_of(table))]
        self.sources_ = np.repeat(np.arange(len(self.columns_)), [column.width for column in self.columns_])
        return self

    def transform(self, table: Any) -> Matrix:
        """The numbers (n, d'), all finite where the table's are.

        Raises:
            ValueError: text where the context had numbers.
        """
        blocks, surprised = [], []
        for column, values in zip(self.columns_, _columns_of(table)):
            block, missing = _encode(column, values)
            if missing and not column.had_missing:
                surprised.append(column.name)
            blocks.append(block)
        if surprised:
            warnings.warn(
                f"values are missing in {surprised}, which the context has complete; its medians stand in"
                " (a text column gets no category)",
                UserWarning,
                stacklevel=3,
            )
        return np.concatenate(blocks, axis=1)


def _columns_of(table: Any) -> list[Any]:
    """A frame's columns as series, an array's as they are."""
    if hasattr(table, "iloc"):
        return [table.iloc[:, number] for number in range(table.shape[1])]
    return list(np.asarray(table, dtype=np.float64).T)


def _numbers(values: Any) -> Matrix | None:
    """The column as floats with NaN where missing, or None where it is text."""
    if isinstance(values, np.ndarray):
        return values
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(values):
        stamps = pd.to_datetime(values, utc=True).dt.tz_localize(None).to_numpy(dtype="datetime64[us]")
        return np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64) / 1e6)
    if pd.api.types.is_timedelta64_dtype(values):
        return np.asarray(values.dt.total_seconds(), dtype=np.float64)
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(object)
    numbers = pd.to_numeric(values, errors="coerce")
    if bool((numbers.isna() & values.notna()).any()):
        return None
    return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))


def _texts(values: Any) -> tuple[NDArray[np.str_], NDArray[np.bool_]]:
    missing = np.asarray(values.isna(), dtype=bool)
    return np.asarray(values.astype(str), dtype=str), missing


def _learn(name: str, values: Any) -> Column:
    numbers = _numbers(values)
    if numbers is not None:
        missing = np.isnan(numbers)
        present = numbers[~missing]
        # The middle element rather than a mean of two: it cannot overflow.
        fill = float(np.sort(present)[len(present) // 2]) if len(present) else 0.0
        return Column(name, fill, bool(missing.any()))
    texts, missing = _texts(values)
    found, counts = np.unique(texts[~missing], return_counts=True)
    if len(found) > _MAX_CATEGORIES:
        raise ValueError(
            f"column {name!r} holds text with {len(found)} different values, such as {str(found[0])[:40]!r}; at most"
            f" {_MAX_CATEGORIES} become categories: drop it or turn it into numbers first"
        )
    order = np.argsort(-counts, kind="stable")
    return Column(name, 0.0, bool(missing.any()), tuple(str(value) for value in found[order]))


def _encode(column: Column, values: Any) -> tuple[Matrix, bool]:
    if column.categories:
        texts, missing = _texts(values)
        block = (texts[:, None] == np.asarray(column.categories)) * np.sqrt(0.5)
        block[missing] = 0.0
    else:
        numbers = _numbers(values)
        if numbers is None:
            texts, _ = _texts(values)
            raise ValueError(
                f"column {column.name!r} held numbers in the context and now holds text, such as {texts[0][:40]!r}"
            )
        missing = np.isnan(numbers)
        block = np.where(missing, column.fill, numbers)[:, None]
    if column.had_missing:
        # A missing text is at sqrt(1/2) from every category already; the flag makes it 1.
        flag = missing * (np.sqrt(0.5) if column.categories else 1.0)
        block = np.concatenate([block, flag[:, None]], axis=1)
    return block, bool(missing.any())
