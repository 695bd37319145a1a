"""Checkpoints: round trip, refusal of what is damaged, the old one kept until the new one is whole."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from moesaic.formats import atomic
from moesaic.formats.checkpoint import (
    FORMAT_VERSION,
    MANIFEST,
    latest_checkpoint,
    list_checkpoints,
    save_checkpoint,
    unshared,
    verify_checkpoint,
)

PARTS = {
    "model": {"w": torch.arange(6.0).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16)},
    "state": {"n": torch.tensor(7)},
    "nothing": {},
}


def save(root, step, **options):
    return save_checkpoint(root, step, PARTS, {"position": {"x": 0.1}}, **options)


def test_round_trip(tmp_path):
    save(tmp_path, 3, write_extra=lambda folder: (folder / "config.json").write_text("{}"))
    found = latest_checkpoint(tmp_path)
    assert found.step == 3
    assert found.meta == {"position": {"x": 0.1}}
    model = found.tensors("model")
    assert torch.equal(model["w"], PARTS["model"]["w"])
    assert model["b"].dtype == torch.bfloat16
    assert found.tensors("state")["n"].item() == 7
    assert found.tensors("nothing").keys() == {"__empty__"}
    assert (found.path / "config.json").is_file()


def test_only_the_newest_are_kept_and_steps_sort_as_numbers(tmp_path):
    for step in (5, 99_999_999, 100_000_000):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-99999999", "step-100000000"]
    assert latest_checkpoint(tmp_path).step == 100_000_000


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", MANIFEST])
def test_a_truncated_file_is_named(tmp_path, name):
    path = save(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{name}.*truncated"):
        latest_checkpoint(tmp_path)


def test_a_changed_byte_and_a_missing_file_are_named(tmp_path):
    path = save(tmp_path, 1)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        verify_checkpoint(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        verify_checkpoint(path)


def test_a_damaged_newest_names_the_older_ones(tmp_path):
    save(tmp_path, 1, keep=2)
    path = save(tmp_path, 2, keep=2)
    (path / "state.safetensors").unlink()
    with pytest.raises(ValueError, match="step-00000001"):
        latest_checkpoint(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["version"] = FORMAT_VERSION + 1
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"version {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}"):
        latest_checkpoint(tmp_path)


def test_no_checkpoint_and_foreign_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        latest_checkpoint(tmp_path / "nowhere")
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(ValueError, match="is not a checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "step-00000001").iterdir())

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "_sync", full)
    with pytest.raises(OSError) as caught:
        save(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "step-00000001").iterdir()) == before


def test_a_failing_tensor_writer_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        save_checkpoint(tmp_path, 1, {"no/such/folder": {"w": torch.ones(1)}}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_again_keeps_a_whole_one_and_replaces_a_damaged_one(tmp_path):
    path = save(tmp_path, 1)
    stamp = (path / MANIFEST).stat().st_mtime_ns
    save(tmp_path, 1)
    assert (path / MANIFEST).stat().st_mtime_ns == stamp
    (path / "model.safetensors").write_bytes(b"")
    save(tmp_path, 1)
    assert verify_checkpoint(path).step == 1


def test_tied_tensors_are_stored_once():
    weight = torch.ones(2, 2)
    assert list(unshared({"embedding": weight, "head": weight, "part": weight[0]})) == ["embedding", "part"]


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (1, 0)])
def test_bad_arguments(tmp_path, step, keep):
    with pytest.raises(ValueError, match="at least"):
        save_checkpoint(tmp_path, step, {}, {}, keep=keep)
