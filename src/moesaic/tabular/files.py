"""Tables from files as people have them: separators, decimal commas, dates; nothing is lost or shifted unsaid."""

from __future__ import annotations

import csv
import gzip
import warnings
from pathlib import Path
from typing import Any

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"


def read_table(path: Path) -> Any:
    """A data frame from a table whose first line names its columns.

    A .csv file may separate by semicolons (then numbers may have decimal commas); columns of ISO 8601 dates become
    dates.

    Args:
        path: a .csv or .tsv file, also .gz.

    Raises:
        ImportError: pandas is not installed.
        FileNotFoundError: no such file.
        ValueError: another suffix, no table, rows with more fields than the first line names.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError('reading tables needs pandas: pip install "moesaic[tabular]"') from error
    if not path.name.lower().endswith(SUFFIXES):
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        separator = _separator(path)
        frame = _read(path, separator, ".")
        if separator == ";":
            commas = _read(path, separator, ",")
            frame = max(frame, commas, key=_numeric_columns)  # the first where they are equal
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"{path} has rows with more fields than its first line names columns: name every column, or quote fields"
            " that contain the separator"
        ) from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a table: {error}") from error
    for name in frame.columns:
        values = frame[name]
        if pd.api.types.is_string_dtype(values) and bool(values.dropna().astype(str).str.fullmatch(_ISO_DATE).all()):
            dates = pd.to_datetime(values, format="ISO8601", errors="coerce", utc=True)
            if len(values.dropna()) and bool((dates.notna() == values.notna()).all()):
                frame[name] = dates
    return frame


def _separator(path: Path) -> str:
    """Tab for .tsv; otherwise a semicolon where the first line has one and no comma."""
    if ".tsv" in path.name.lower():
        return "\t"
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        first = file.readline()
    return ";" if len(next(csv.reader([first]), [])) == 1 and ";" in first else ","


def _read(path: Path, separator: str, decimal: str) -> Any:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        # Without index_col=False a field too many in each row shifts all columns, silently.
        return pd.read_csv(path, sep=separator, decimal=decimal, index_col=False, encoding="utf-8-sig")


def _numeric_columns(frame: Any) -> int:
    return int(frame.select_dtypes("number").shape[1])
