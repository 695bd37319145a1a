"""Text to train on: plain files, JSON lines and `datasets` folders, refused at the door when they are not text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("text", "jsonl", "datasets")
SHAKESPEARE = Path(__file__).parent / "assets" / "tinyshakespeare.txt"  # bundled: 1.1 MB, public domain


@dataclass(frozen=True)
class Documents:
    """Documents in order, and where they came from.

    Args:
        texts: one string a document; a plain text file is one document.
        source: path, for messages and reports.
    """

    texts: Sequence[str]
    source: str

    def split(self, fractions: Sequence[float]) -> list[Documents]:
        """Contiguous parts in order: by position in a single document, by whole documents otherwise.

        Args:
            fractions: share of each part, positive, summing to at most 1 (what is left over goes to the first).

        Raises:
            ValueError: fractions outside (0, 1] or summing to more than 1; a part that would be empty.
        """
        if any(not 0 < part <= 1 for part in fractions) or sum(fractions) > 1 + 1e-9:
            raise ValueError(f"fractions must be in (0, 1] and sum to at most 1, got {list(fractions)}")
        single = len(self.texts) == 1
        total = len(self.texts[0]) if single else len(self.texts)
        ends = [total]
        for part in reversed(fractions[1:]):
            ends.append(ends[-1] - round(part * total))
        ends.reverse()
        starts = [0, *ends[:-1]]
        parts = []
        for fraction, start, end in zip(fractions, starts, ends):
            if end <= start:
                unit = "characters" if single else "documents"
                raise ValueError(f"a part of {fraction:g} of {self.source} is empty: it has only {total} {unit}")
            parts.append(Documents([self.texts[0][start:end]] if single else self.texts[start:end], self.source))
        return parts


def read_documents(
    path: str | os.PathLike[str], *, format: str | None = None, field: str = "text", subset: str | None = None
) -> Documents:
    """Read the documents at ``path``.

    Args:
        path: a text file, a ``.jsonl`` file with one object a line, or a folder written by ``datasets.save_to_disk``.
        format: one of ``FORMATS``; by default from the kind of path.
        field: key or column that holds the text, in JSON lines and `datasets`.
        subset: which split of a `datasets` folder that holds several.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: an unknown format, bytes that are not UTF-8 (their position is named), a line that is no object with
            ``field``, no text at all.
        ImportError: a `datasets` folder without the extra.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path is {str(path)!r}, which does not exist")
    if format is None:
        format = "datasets" if path.is_dir() else "jsonl" if path.suffix in (".jsonl", ".ndjson") else "text"
    if format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {format!r}")
    if format == "datasets":
        texts = _read_datasets(path, field, subset)
    elif path.is_dir():
        raise IsADirectoryError(f"path is {str(path)!r}, a folder; format {format!r} reads a file")
    else:
        content = _decode(path)
        texts = [content] if format == "text" else _read_lines(content, path, field)
    texts = [text for text in texts if text]
    if not any(text.strip() for text in texts):
        raise ValueError(f"{path} holds no text: {'it is empty' if not texts else 'only white space'}")
    return Documents(texts, str(path))


def _decode(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start} (line {line});"
            " convert it first"
        ) from error


def _read_lines(content: str, path: Path, field: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            has = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{path} line {number} has no text under {field!r}; it has {has}")
        texts.append(value[field])
    return texts


def _read_datasets(path: Path, field: str, subset: str | None) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'{path} is a folder of `datasets`: pip install "moesaic[datasets]"') from error
    if not (path / "dataset_info.json").is_file() and not (path / "dataset_dict.json").is_file():
        raise ValueError(f"{path} is a folder but not one written by datasets.save_to_disk")
    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        if subset is None and len(data) > 1:
            raise ValueError(f"{path} holds the splits {sorted(data)}: name one as subset")
        name = next(iter(data)) if subset is None else subset
        if name not in data:
            raise ValueError(f"subset is {name!r}, {path} holds {sorted(data)}")
        data = data[name]
    if field not in data.column_names:
        raise ValueError(f"field is {field!r}, {path} has the columns {data.column_names}")
    return [str(text) for text in data[field] if text is not None]
