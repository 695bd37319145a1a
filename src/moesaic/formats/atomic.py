"""Files and folders that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_TEMPORARY = ".tmp-"


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path``; on success it is flushed to disk and renamed to ``path``.

    After an exception, or a kill at any moment, ``path`` is what it was before.

    Args:
        path: the file to write or replace.

    Yields:
        A binary file to write to.

    Raises:
        OSError: what the file system says (no space, no permission); the temporary file is removed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside ``path``; on success its files are flushed to disk and it is renamed to ``path``.

    Args:
        path: the folder to make; it must not exist (name each version anew, remove the old one afterwards).

    Yields:
        The temporary folder to write into.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: what the file system says; the temporary folder is removed.
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"path is {str(target)!r}, which exists: an atomic folder is written once")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            _sync(file)
        _sync(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def remove_leftovers(folder: str | os.PathLike[str]) -> list[str]:
    """Remove what killed writers left in ``folder``; returns the names."""
    names = []
    for entry in sorted(Path(folder).glob(f"{_TEMPORARY}*")):
        names.append(entry.name)
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return names


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Make a rename durable; a file system that cannot sync folders is left as it is."""
    with contextlib.suppress(OSError):
        _sync(path)
