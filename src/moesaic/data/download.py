"""Public data sets by name: a local mirror where there is one, otherwise the source by URL and checksum."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pooch

logger = logging.getLogger("moesaic.data")
pooch.get_logger().setLevel(logging.WARNING)  # downloads are announced by our own logger

_SOURCE = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40}):(?P<path>.+)$")
_RAW_URL = "https://raw.githubusercontent.com/{repo}/{commit}/{path}"


@dataclass(frozen=True)
class DataFile:
    """One file of the registry: where it comes from and what its bytes must be.

    Args:
        name: path below the data folder, such as ``"tabular/wine.npz"``.
        size: length in bytes.
        sha256: checksum in lower-case hexadecimal.
        source: ``OWNER/REPOSITORY@COMMIT:PATH`` of a public GitHub repository.
        licence: what the source says about use.
        used_by: the systems whose experiments read it.
    """

    name: str
    size: int
    sha256: str
    source: str
    licence: str
    used_by: str

    @property
    def url(self) -> str:
        """Address of the raw file at the pinned commit."""
        match = _SOURCE.match(self.source)
        if match is None:
            raise ValueError(f"source of {self.name} is {self.source!r}; it must read OWNER/REPOSITORY@COMMIT:PATH")
        return _RAW_URL.format(repo=match["repo"], commit=match["commit"], path=quote(match["path"]))


def fetch(
    name: str, *, mirror: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Path of a data file whose checksum has been verified, downloaded on first use.

    Looked up in this order: the mirror, the cache folder, the file's own URL. A mirror is a folder or an ``http(s)``
    address laid out like the registry's names.

    Args:
        name: a name of :func:`registry`, such as ``"tabular/wine.npz"``.
        mirror: folder or base address; by default the environment variable ``MOESAIC_DATA``, if set.
        cache_dir: where downloads are kept; by default the user's cache folder.

    Returns:
        The local path. A file inside a mirror folder is returned where it lies (it may be read-only).

    Raises:
        ValueError: an unknown name, or a mirror file whose checksum is not the registry's.
        FileNotFoundError: the mirror is a folder without this file.
        OSError: the download failed.
    """
    entry = registry().get(name)
    if entry is None:
        raise ValueError(f"name is {name!r}, which is not in the data registry; known in {_near(name)}")
    mirror = os.environ.get("MOESAIC_DATA") if mirror is None else mirror
    address = str(mirror) if mirror else ""
    if address and not address.startswith(("http://", "https://")):
        return _from_folder(Path(address), entry)
    url = f"{address.rstrip('/')}/{quote(name)}" if address else entry.url
    folder = Path(cache_dir) if cache_dir is not None else Path(pooch.os_cache("moesaic")) / "data"
    target = folder / PurePosixPath(name)
    if not target.exists():
        logger.info("downloading %s (%d bytes) from %s", name, entry.size, url)
    try:
        return Path(
            pooch.retrieve(
                url,
                known_hash=f"sha256:{entry.sha256}",
                fname=target.name,
                path=target.parent,
                downloader=pooch.HTTPDownloader(progressbar=False, timeout=30),
            )
        )
    except OSError as error:  # requests' errors too
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = type(error).__name__ if status is None else f"HTTP {status}"
        raise OSError(
            f"could not download {name} from {url} ({reason}); without a network, set MOESAIC_DATA to a"
            f" folder that holds {name}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{name} from {url} does not have the registry's sha256 {entry.sha256}: {error}") from error


@cache
def registry() -> dict[str, DataFile]:
    """All files that :func:`fetch` knows, by name."""
    text = resources.files("moesaic.data").joinpath("registry.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        row["file"]: DataFile(
            row["file"], int(row["bytes"]), row["sha256"], row["source"], row["licence"], row["used_by"]
        )
        for row in rows
    }


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Checksum of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_folder(folder: Path, entry: DataFile) -> Path:
    path = folder / PurePosixPath(entry.name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the mirror {folder} lacks {entry.name}; unset MOESAIC_DATA to download it"
        )
    found = sha256_of(path)
    if found != entry.sha256:
        raise ValueError(f"{path} has sha256 {found}, the registry says {entry.sha256}: replace the file")
    return path


def _near(name: str) -> str:
    folder = name.split("/", 1)[0]
    same = sorted(known for known in registry() if known.startswith(folder + "/"))
    return (
        f"{folder}/: {', '.join(same)}" if same else f"the folders {sorted({k.split('/', 1)[0] for k in registry()})}"
    )
