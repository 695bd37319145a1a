"""Data by name: mirrors, checksums, the loopback download."""

import functools
import hashlib
import http.server
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from moesaic.data import download
from moesaic.data.download import DataFile, fetch, registry, sha256_of

NAME = "tabular/toy.npz"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder laid out like the registry, with one file, and a registry that knows it."""
    folder = tmp_path / "mirror"
    path = folder / NAME
    path.parent.mkdir(parents=True)
    np.savez(path, X=np.eye(3), y=np.array([0, 0, 1]))
    source = "somebody/tables@" + "0" * 40 + ":data/a toy.npz"
    entry = DataFile(NAME, path.stat().st_size, sha256_of(path), source, "MIT", "ofa-tad")
    monkeypatch.setattr(download, "registry", lambda: {NAME: entry})
    monkeypatch.delenv("MOESAIC_DATA", raising=False)
    return folder


@pytest.fixture
def server(mirror):
    """The mirror behind a loopback address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(mirror))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
        httpd.shutdown()
        thread.join()


def test_registry_is_pinned_and_whole():
    entries = registry()
    assert len(entries) >= 100
    for name, entry in entries.items():
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256), name
        assert entry.size > 0
        assert re.match(r"https://[^/]+/[\w.-]+/[\w.-]+/[0-9a-f]{40}/\S+$", entry.url), name
        assert ".." not in Path(name).parts
        assert entry.licence
    assert len([name for name in entries if name.startswith("tabular/")]) == 30


def test_a_folder_is_read_where_it_lies(mirror):
    assert fetch(NAME, mirror=mirror) == mirror / NAME


def test_the_environment_names_the_mirror(mirror, monkeypatch):
    monkeypatch.setenv("MOESAIC_DATA", str(mirror))
    assert fetch(NAME) == mirror / NAME


def test_download_from_a_loopback_mirror_once(server, tmp_path, mirror):
    address, asked = server
    path = fetch(NAME, mirror=address, cache_dir=tmp_path / "cache")
    assert path.read_bytes() == (mirror / NAME).read_bytes()
    assert path == tmp_path / "cache" / NAME
    assert fetch(NAME, mirror=address + "/", cache_dir=tmp_path / "cache") == path
    assert asked == ["/" + NAME]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_damaged_cache_is_downloaded_again(server, tmp_path, mirror):
    address, asked = server
    path = fetch(NAME, mirror=address, cache_dir=tmp_path / "cache")
    path.write_bytes(b"half a fi")
    fetch(NAME, mirror=address, cache_dir=tmp_path / "cache")
    assert sha256_of(path) == hashlib.sha256((mirror / NAME).read_bytes()).hexdigest()
    assert len(asked) == 2


def test_wrong_bytes_are_refused_and_not_kept(server, tmp_path, mirror):
    address, _ = server
    (mirror / NAME).write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        fetch(NAME, mirror=address, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / NAME).exists()
    with pytest.raises(ValueError, match="sha256"):
        fetch(NAME, mirror=mirror)


def test_missing_files_and_names(server, tmp_path, mirror):
    address, _ = server
    with pytest.raises(ValueError, match=r"name is 'tabular/other.npz'.*toy"):
        fetch("tabular/other.npz", mirror=mirror)
    (mirror / NAME).unlink()
    with pytest.raises(FileNotFoundError, match="MOESAIC_DATA"):
        fetch(NAME, mirror=mirror)
    with pytest.raises(OSError, match="404"):
        fetch(NAME, mirror=address, cache_dir=tmp_path / "cache")


def test_without_a_network_the_message_says_what_to_do(mirror, tmp_path):
    with pytest.raises(OSError, match=r"could not download tabular/toy.npz from .*MOESAIC_DATA"):
        fetch(NAME, mirror="http://127.0.0.1:9", cache_dir=tmp_path / "cache")


def test_a_source_that_is_no_pinned_repository():
    with pytest.raises(ValueError, match="OWNER/REPOSITORY@COMMIT:PATH"):
        _ = DataFile("a", 1, "0" * 64, "https://example.org/a", "MIT", "x").url
