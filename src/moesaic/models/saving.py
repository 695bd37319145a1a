"""Writing a model after surgery: native where transformers can say it, with moesaic's own note where layers differ."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moesaic.formats.atomic import atomic_folder
from moesaic.models.architectures import model_class
from moesaic.models.expert_index import expert_tensors
from moesaic.models.handle import MoELayer, moe_layers, select_layers
from moesaic.models.masked import padded
from moesaic.models.shared import written_state
from moesaic.models.surgery_checks import check_adapters
from moesaic.models.surgery_counts import NOTE, configurations, note_of, numbers_of, set_layer_counts, stated_counts


@dataclasses.dataclass(frozen=True)
class Saved:
    """What :func:`save` wrote.

    Args:
        path: the folder.
        native: whether stock ``from_pretrained`` opens it; otherwise :func:`moesaic.load` does.
        experts: layer -> experts in the file, each place of a shared block by its own name.
        bytes: size of the folder.
    """

    path: Path
    native: bool
    experts: Mapping[str, int]
    bytes: int


def save(
    model: PreTrainedModel, path: str | os.PathLike[str], *, masked: bool = False, max_shard_size: str = "5GB"
) -> Saved:
    """Write ``model`` as a checkpoint; the folder is there whole or not at all.

    Where all layers have the same number of experts and the same top-k, the checkpoint is the family's own and stock
    ``from_pretrained`` opens it. Where they differ, no configuration of transformers can say so: the tensors keep the
    family's names, ``config.json`` carries the numbers of each layer under ``moesaic_experts``, stock tools refuse it
    by shape and :func:`moesaic.load` opens it. A block that several layers share is written for each of them and opens
    as equal copies.

    Args:
        model: a model of ours or of transformers.
        path: folder to make; it must not exist.
        masked: pad every layer to the largest count with experts that are never chosen, so that stock tools open it
            with equal logits. Only for routers with a bias for each expert.
        max_shard_size: of one safetensors file.

    Raises:
        TypeError: no model of transformers or ours.
        ValueError: an adapter around the model; counts of tensors and modules that disagree; a mask that the family
            cannot express.
        FileExistsError: ``path`` exists.
    """
    plain: Any = getattr(model, "_orig_mod", model)
    if hasattr(plain, "peft_config") and hasattr(plain, "merge_and_unload"):
        raise ValueError("model is wrapped by peft, which would save the adapter alone: merge_and_unload() it first")
    if not isinstance(plain, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, got {type(plain).__name__}")
    layers = moe_layers(plain)
    for layer in layers:
        check_adapters(plain, layer)
        _check_counts(layer)
    if masked:
        with padded(plain):
            return save(plain, path, max_shard_size=max_shard_size)
    note = note_of(plain, numbers_of(layers))
    ragged = len({(layer.num_experts, layer.top_k) for layer in layers}) > 1
    _check_widths(plain, layers)
    if not ragged:
        _check_config(plain, layers)
    with atomic_folder(path) as folder, _noted(plain, note if ragged else None):
        plain.save_pretrained(folder, max_shard_size=max_shard_size, state_dict=written_state(plain))
    size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return Saved(Path(path), not ragged, {name: entry["num_experts"] for name, entry in note["layers"].items()}, size)


def ragged_class(folder: Path) -> type[PreTrainedModel] | None:
    """The model class for a checkpoint whose layers differ, made to fit its note; None for an ordinary checkpoint.

    Args:
        folder: with a readable config.json.

    Raises:
        ValueError: a note that is damaged, or a class that is not there.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    note = config.get(NOTE)
    if note is None:
        return None
    try:
        counts = {
            str(name): (int(entry["num_experts"]), None if entry["top_k"] is None else int(entry["top_k"]))
            for name, entry in note["layers"].items()
        }
        name, kind = str(config["architectures"][0]), str(config["model_type"])
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{folder / 'config.json'}: {NOTE} is damaged ({type(error).__name__}: {error})") from error
    base = model_class(name, kind, str(note.get("module", "")))
    if base is None:
        raise ValueError(f"the model class {name} of type {kind!r} is not in the installed transformers or moesaic")

    def build(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # loading sets the checkpoint's; probing a router needs real numbers
        try:
            with torch.device("cpu"):
                _resize(self, counts)
        finally:
            torch.set_default_dtype(dtype)

    return type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})


def restore_class(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model of :func:`ragged_class` its family's own class back."""
    model.__class__ = type(model).__mro__[1]
    return model


@torch.no_grad()
def _resize(model: nn.Module, counts: Mapping[str, tuple[int, int | None]]) -> None:
    """Shapes and numbers of a model that is being built; its tensors come afterwards."""
    found = moe_layers(model)
    if {layer.name for layer in found} != set(counts):
        raise ValueError(f"{NOTE} names {sorted(counts)}, the model has {[layer.name for layer in found]}")
    for name, (count, top_k) in counts.items():
        layer = select_layers(model, [name])[0]
        if not 1 <= count <= layer.num_experts:
            raise ValueError(f"{NOTE}: layer {name} has {count} experts, the configuration says {layer.num_experts}")
        tensors = expert_tensors(layer)
        kept = list(range(count)) if layer.shell is None else layer.shell.exchange.first(count, layer.num_experts)
        for item in tensors:
            if item.part == "module":
                continue
            index = torch.tensor(item.index(kept, layer.num_experts))
            value = item.tensor.detach()
            for axis in item.axes:
                value = value.index_select(axis, index.to(value.device))
            item.tensor.data = value
        if layer.shell is not None:
            layer.shell.experts.rearrange(kept)
        set_layer_counts(layer, kept, top_k)
        # A block's initialisation may count experts by the configuration; its tensors all come from the file.
        setattr(layer.module, "_is_hf_initialized", True)  # noqa: B010


def _check_counts(layer: MoELayer) -> None:
    for item in expert_tensors(layer):
        for axis in item.axes:
            if item.tensor.shape[axis] != item.places(layer.num_experts):
                raise ValueError(
                    f"{item.name} has {item.tensor.shape[axis]} places for experts, the layer has {layer.num_experts}:"
                    " nothing was written"
                )


def _check_config(model: PreTrainedModel, layers: list[MoELayer]) -> None:
    count = layers[0].num_experts
    for config in configurations(model):
        wrong = {name: value for name, value in stated_counts(config).items() if value != count}
        if wrong and stated_counts(config) == wrong:
            raise ValueError(
                f"{type(config).__name__} states {wrong} and the tensors hold {count} experts a layer: nothing was"
                " written; change experts by moesaic's functions, which keep both together"
            )


def _check_widths(model: PreTrainedModel, layers: list[MoELayer]) -> None:
    spec = getattr(model.config, "experts", None)
    if not isinstance(spec, dict) or spec.get("widths") is None:
        return
    widths = {tuple(getattr(layer.experts, "widths", None) or ()) for layer in layers}
    if widths != {tuple(spec["widths"])}:
        raise ValueError(
            f"experts have the widths {sorted(widths)} and the configuration says {spec['widths']} for every layer:"
            " nothing was written; make the same change in every layer and set config.experts['widths']"
        )


@contextmanager
def _noted(model: PreTrainedModel, note: Mapping[str, Any] | None) -> Iterator[None]:
    """The configuration with the note while it is written, with the largest count where it states one."""
    config: Any = model.config
    had = getattr(config, NOTE, None)
    stated: list[tuple[Any, str, int]] = []
    try:
        if had is not None:
            delattr(config, NOTE)
        if note is not None:
            setattr(config, NOTE, dict(note))
            largest = max(entry["num_experts"] for entry in note["layers"].values())
            for found in configurations(model):
                for name, value in stated_counts(found).items():
                    if value < largest:
                        stated.append((found, name, value))
                        setattr(found, name, largest)
        yield
    finally:
        for found, name, value in stated:
            setattr(found, name, value)
        if hasattr(config, NOTE):
            delattr(config, NOTE)
        if had is not None:
            setattr(config, NOTE, had)
