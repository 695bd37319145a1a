"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import pytest

from moesaic.formats.atomic import atomic_file, atomic_folder, remove_leftovers


def write_half(target):
    with atomic_file(target) as file:
        file.write(b"half")
        raise RuntimeError("stop")


def fill_half(target):
    with atomic_folder(target) as folder:
        (folder / "x").write_text("x")
        raise OSError(28, "No space left on device")


def test_file_appears_only_when_the_block_ends(tmp_path):
    target = tmp_path / "sub" / "a.json"
    with atomic_file(target) as file:
        file.write(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert [entry.name for entry in target.parent.iterdir()] == ["a.json"]


def test_file_keeps_its_old_content_after_an_error(tmp_path):
    target = tmp_path / "a.json"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="stop"):
        write_half(target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_folder_is_renamed_at_the_end_and_removed_after_an_error(tmp_path):
    with atomic_folder(tmp_path / "one") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "x").write_text("x")
        assert not (tmp_path / "one").exists()
    assert (tmp_path / "one" / "inner" / "x").read_text() == "x"
    with pytest.raises(OSError):
        fill_half(tmp_path / "two")
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


def test_folder_is_written_once(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileExistsError, match="one"), atomic_folder(tmp_path / "one"):
        pass


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / ".tmp-step-00000001-12").mkdir()
    (tmp_path / ".tmp-step-00000001-12" / "x").write_text("half")
    (tmp_path / ".tmp-a.json-12").write_text("half")
    (tmp_path / "a.json").write_text("whole")
    assert remove_leftovers(tmp_path) == [".tmp-a.json-12", ".tmp-step-00000001-12"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
