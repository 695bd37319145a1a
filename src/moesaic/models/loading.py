"""Opening a checkpoint: ours or a transformers MoE; what is missing is an error, never a random tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from moesaic.models.architectures import CONFIGURATION_ERRORS, architecture, refusal_in_one_line
from moesaic.models.configuration import FORMAT, MoesaicConfig
from moesaic.models.loading_report import check_loading
from moesaic.models.modeling import MoesaicForCausalLM
from moesaic.models.saving import ragged_class, restore_class


def load(
    path: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None
) -> PreTrainedModel:
    """Open a model from a folder: ours, or any that transformers knows, as the class that config.json names.

    Nothing is downloaded, and code that a checkpoint brings is never run. The model comes back in evaluation mode.

    Args:
        path: folder with config.json and safetensors, or the folder of a finished ``moesaic train`` run.
        dtype: of the weights; ``"auto"`` as they are stored. Our routers stay float32.
        device: where to put it; the CPU by default.

    Raises:
        FileNotFoundError: no such folder, no config.json, no weights.
        ValueError: a configuration that cannot be read, names an unknown model type or part, or has a newer format; a
            damaged shard; tensors that are missing, left over, of another shape, or hold NaN or inf, counted and the
            first ones named.
    """
    folder = model_folder(path)
    config = _configuration(folder)
    foreign = config["model_type"] != MoesaicConfig.model_type
    cls: Any = MoesaicForCausalLM
    options: dict[str, Any] = {}
    if foreign:
        cls, options["config"] = architecture(folder, config)
    _check_shards(folder)
    ragged = ragged_class(folder)
    cls = ragged or cls
    try:
        model, report = cls.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            local_files_only=True,
            use_safetensors=True,
            **options,
        )
    except SafetensorError as error:
        raise ValueError(f"{folder} holds a damaged safetensors file: {error}") from error
    except CONFIGURATION_ERRORS as error:
        if not foreign:
            raise
        raise ValueError(refusal_in_one_line(folder, config, error)) from error
    check_loading(str(folder), report)
    if ragged is not None:
        restore_class(model)
    _check_finite(folder, model)
    loaded: PreTrainedModel = model.eval() if device is None else model.eval().to(device)
    return loaded


def model_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that holds a model: ``path`` itself, or ``model`` in the folder of a training run."""
    folder = Path(path)
    inner = folder / "model"
    return inner if not (folder / "config.json").exists() and (inner / "config.json").exists() else folder


def _check_finite(folder: Path, model: PreTrainedModel) -> None:
    wide = [
        (name, value) for name, value in model.named_parameters() if value.is_floating_point() and value.itemsize > 1
    ]
    bad = [name for name, value in wide if not bool(torch.isfinite(value).all())]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"{folder} holds {len(bad)} tensors with NaN or inf: {', '.join(bad[:5])}{more}")


def _configuration(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the folder of a checkpoint, with config.json in it")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is not a checkpoint")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config["model_type"] = str(config["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the configuration of a model: {type(error).__name__}: {error}") from error
    version = config.get("moesaic_format", 0)
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"{file} has format {version}, this moesaic reads up to {FORMAT}: install a newer moesaic")
    return config


def _check_shards(folder: Path) -> None:
    """Every shard is there and whole, by the length that its header states."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of shards: {error}") from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:5])}")
    for name in names:
        check_whole(folder / name)


def check_whole(file: Path) -> None:
    """Refuse a safetensors file that is shorter or longer than its header says.

    Raises:
        ValueError: a file that is truncated or no safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            header_size = int.from_bytes(opened.read(8), "little")
            if not 2 <= header_size <= size - 8:
                raise ValueError(f"its header would take {header_size} of {size} bytes")
            header = json.loads(opened.read(header_size))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    if size != 8 + header_size + end:
        raise ValueError(f"{file} is damaged: its header promises {8 + header_size + end} bytes, it has {size}")
