"""Checkpoints: a folder of safetensors and JSON files with a manifest, written atomically and verified when read."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.formats.atomic import atomic_folder, remove_leftovers

FORMAT = "moesaic-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk.

    Attributes:
        path: its folder.
        step: optimizer steps taken when it was written.
        meta: what the writer put beside the tensors.
    """

    path: Path
    step: int
    meta: Mapping[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of one of its files, on the CPU; name -> tensor.

        Raises:
            ValueError: no such file, or one that safetensors cannot read.
        """
        file = self.path / f"{name}.safetensors"
        if not file.is_file():
            raise ValueError(f"{file} does not exist: the checkpoint {self.path} has no part {name!r}")
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, Any],
    *,
    keep: int = 1,
    write_extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write ``root/step-XXXXXXXX`` and then remove the oldest beyond ``keep``.

    The folder gets a temporary name, is flushed to disk and renamed; only then are older checkpoints removed, so at any
    moment one that is whole lies on disk.

    Args:
        root: folder of all checkpoints of a run.
        step: optimizer steps taken.
        parts: file name without ending -> {tensor name: tensor}.
        meta: anything JSON can hold.
        keep: how many checkpoints stay, this one included.
        write_extra: writes further files (a configuration, a tokenizer) into the temporary folder.

    Returns:
        The folder.

    Raises:
        ValueError: ``keep`` below 1 or a negative step.
        OSError: the disk is full or refuses; earlier checkpoints are untouched.
    """
    check_count("keep", keep)
    check_count("step", step, 0)
    root = Path(root)
    target = root / f"step-{step:08d}"
    if target.exists():  # the same step again, after a resume: identical by construction unless damaged
        try:
            verify_checkpoint(target)
        except ValueError:
            shutil.rmtree(target)
        else:
            return target
    with atomic_folder(target) as folder:
        for name, tensors in parts.items():
            _write_tensors(folder / f"{name}.safetensors", tensors)
        if write_extra is not None:
            write_extra(folder)
        files = {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        manifest = {"format": FORMAT, "version": FORMAT_VERSION, "step": step, "files": files, "meta": dict(meta)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for old in list_checkpoints(root)[:-keep]:
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return target


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Checkpoint folders below ``root``, oldest step first."""
    root = Path(root)
    found = [(int(match[1]), entry) for entry in root.glob("step-*") if (match := _STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found)]


def latest_checkpoint(root: str | os.PathLike[str]) -> Checkpoint:
    """The newest checkpoint below ``root``, verified; what killed writers left is removed.

    Raises:
        ValueError: there is none, or the newest is damaged (older ones are named).
    """
    root = Path(root)
    if root.is_dir():
        remove_leftovers(root)
    found = list_checkpoints(root)
    if not found:
        raise ValueError(f"no checkpoint in {root}: train without resuming, or name the folder of an earlier run")
    try:
        return verify_checkpoint(found[-1])
    except ValueError as error:
        if len(found) == 1:
            raise
        raise ValueError(f"{error}; older checkpoints there: {[path.name for path in found[:-1]]}") from error


def verify_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Check format, version, and size and checksum of every file.

    Raises:
        ValueError: not a checkpoint, a newer format version, or a missing, truncated or changed file, which is named.
    """
    path = Path(path)
    manifest_file = path / MANIFEST
    if not manifest_file.is_file():
        raise ValueError(f"{manifest_file} does not exist: {path} is not a checkpoint of a moesaic training run")
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{manifest_file} is truncated or damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{manifest_file} does not describe a {FORMAT}")
    if manifest["version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {manifest['version']}, this moesaic reads up to {FORMAT_VERSION}:"
            " install a newer one"
        )
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing from the checkpoint")
        if file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{file} is truncated: {file.stat().st_size} bytes, the manifest says {facts['bytes']}")
        if _crc32(file) != facts["crc32"]:
            raise ValueError(f"{file} is damaged: its checksum is not the manifest's")
    return Checkpoint(path, int(manifest["step"]), manifest["meta"])


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop tied tensors after their first name, which safetensors cannot hold twice."""
    seen: set[tuple[object, ...]] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors.items()}
    if not plain:  # a part may be empty (no averaging, no optimizer state yet) and is still there when it is read
        plain = {"__empty__": torch.zeros(0)}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if "os error 28" in str(error).lower():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(errno.EIO, f"cannot write: {error}", str(path)) from error


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value
