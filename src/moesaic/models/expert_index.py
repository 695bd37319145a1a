"""Which tensors of an MoE layer count experts, and along which axis: what every structural change must follow."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from moesaic.layers import MoE
from moesaic.models.adapters.product_keys import ProductKeys, keys_of
from moesaic.models.adapters.shell import Shell
from moesaic.models.handle import MoELayer
from moesaic.routing import ParameterSpec

_HEADS = re.compile(r"((gate|wg|layer|proj|classifier|.*out_proj)\.)?weight")
_SIDE = re.compile(r"correction_bias|expert_bias|balancing_bias|per_expert")
_BUFFERS_OF_OURS = ("selection_bias_E",)


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertTensor:
    """A parameter or buffer with a place for each expert.

    Args:
        name: its path in the model.
        tensor: the tensor itself; a change replaces its data, so that whoever holds it follows.
        axes: axes that count experts.
        tail: rows behind the experts' that stay behind them (identity experts, shared experts, a skip class).
        part: ``"bank"``, ``"router"``, ``"table"`` (its entries are expert ids, no axis counts experts) or ``"module"``
            (of a module for each expert, which moves as a whole).
        rows: places that each expert has along the axes.
        keys: whether the places are those of keys, twice, whose pairs are the experts.
    """

    name: str
    tensor: Tensor
    axes: tuple[int, ...]
    tail: int
    part: str
    rows: int = 1
    keys: bool = False

    def places(self, experts: int) -> int:
        """Size along the axes where there are ``experts`` experts."""
        return 2 * math.isqrt(experts) if self.keys else (experts + self.tail) * self.rows

    def index(self, sources: Sequence[int], experts: int, tail: Sequence[int] | None = None) -> tuple[int, ...]:
        """The old place for each new one along the axes.

        Args:
            sources: old expert in each new place.
            experts: E before.
            tail: old places behind the experts that stay, where it has such; all by default.
        """
        if self.keys:
            keys = keys_of(self.name, sources, experts)
            return (*keys, *(math.isqrt(experts) + key for key in keys))
        behind = range(experts, experts + self.tail) if tail is None or not self.tail else tail
        whole = (*sources, *behind)
        return tuple(place * self.rows + row for place in whole for row in range(self.rows))


def expert_tensors(layer: MoELayer) -> list[ExpertTensor]:
    """Every tensor of ``layer`` that counts experts, each once.

    Args:
        layer: a handle of :func:`~moesaic.models.handle.moe_layers`.

    Raises:
        ValueError: a tensor whose relation to the experts is not known, named; nothing is guessed.
    """
    found = list(_ours(layer) if layer.shell is None else (*_bank(layer, layer.shell), *_router(layer, layer.shell)))
    once: dict[int, ExpertTensor] = {}
    for item in found:
        once.setdefault(id(item.tensor), item)
    return list(once.values())


def _bank(layer: MoELayer, shell: Shell) -> Iterator[ExpertTensor]:
    experts, bank = layer.num_experts, shell.experts
    for key, holder, rows in bank.stored():
        value = getattr(holder, key)
        name = f"{_path(layer, holder, bank.name)}.{key}"
        if value.shape[0] not in (experts * rows, shell.choices * rows):
            raise ValueError(
                f"{name} {tuple(value.shape)} has no axis of {experts * rows} experts' rows in front: its relation to"
                f" the experts is not known, so layer {layer.name} cannot be changed"
            )
        yield ExpertTensor(name, value, (0,), int(value.shape[0]) // rows - experts, "bank", rows)
    if not bank.stored():
        for key, value in _tensors(bank.module, recurse=True):
            yield ExpertTensor(f"{bank.name}.{key}", value, (), 0, "module")


def _router(layer: MoELayer, shell: Shell) -> Iterator[ExpertTensor]:
    experts = layer.num_experts
    width = shell.found.width or experts
    rows = {width, int(getattr(shell.router, "n_total_experts", width))}
    prefix = _path(layer, shell.router, f"{layer.name}.router")
    tensors = dict(_tensors(shell.router, recurse=True))
    if isinstance(shell.exchange, ProductKeys):
        yield from (ExpertTensor(f"{prefix}.{key}", v, (0,), 0, "router", keys=True) for key, v in tensors.items())
        return
    head = _head(layer, tensors, rows)
    yield ExpertTensor(f"{prefix}.{head}", tensors[head], (0,), int(tensors[head].shape[0]) - experts, "router")
    beside = head.removesuffix("weight") + "bias"
    for key, value in tensors.items():
        if key == head or value.dim() == 0:
            continue
        if not value.dtype.is_floating_point:
            if value.dim() == 2:
                yield ExpertTensor(f"{prefix}.{key}", value, (), 0, "table")
        elif value.numel() == width and (key == beside or _SIDE.search(key)):
            yield ExpertTensor(f"{prefix}.{key}", value, (value.dim() - 1,), width - experts, "router")
        elif _SIDE.search(key) or (value.shape[0] == width != tensors[head].shape[-1]):
            raise ValueError(
                f"{prefix}.{key} {tuple(value.shape)} may belong to the experts of layer {layer.name}, but its meaning"
                " is not known: the layer cannot be changed"
            )
    for key, value in _tensors(shell.block, recurse=False):
        if value.numel() == width and (_SIDE.search(key) or "bias" in key):
            yield ExpertTensor(f"{layer.name}.{key}", value, (value.dim() - 1,), width - experts, "router")


def _head(layer: MoELayer, tensors: Mapping[str, Tensor], rows: set[int]) -> str:
    fitting = [key for key, value in tensors.items() if value.dim() == 2 and value.shape[0] in rows]
    fitting = [key for key in fitting if tensors[key].dtype.is_floating_point]
    named = [key for key in fitting if _HEADS.fullmatch(key)]
    chosen = named if len(fitting) > 1 else fitting
    if len(chosen) != 1:
        raise ValueError(
            f"layer {layer.name}: the router's matrix with a row for each of {sorted(rows)} choices was not found:"
            f" {fitting or 'no tensor'} fits; its tensors are { {k: tuple(v.shape) for k, v in tensors.items()} }"
        )
    return chosen[0]


def _path(layer: MoELayer, part: nn.Module, otherwise: str) -> str:
    for name, module in layer.module.named_modules():
        if module is part:
            return ".".join(piece for piece in (layer.name, name) if piece)
    return otherwise


def _ours(layer: MoELayer) -> Iterator[ExpertTensor]:
    assert isinstance(layer.module, MoE)
    experts = layer.num_experts
    for part, root in (("bank", layer.module.experts), ("router", layer.module.router)):
        if root is None:
            continue
        attribute = "experts" if part == "bank" else "router"
        for prefix, module in root.named_modules():
            declared: Mapping[str, ParameterSpec] = getattr(module, "parameter_axes", {})
            for key, value in _tensors(module, recurse=False):
                name = ".".join(piece for piece in (layer.name, attribute, prefix, key) if piece)
                spec = declared.get(key)
                axes = tuple(a for a, axis in enumerate(spec.axes) if axis == "expert") if spec else ()
                if key in _BUFFERS_OF_OURS:
                    axes = (0,)
                if axes:
                    yield ExpertTensor(name, value, axes, 0, part)
                elif spec is None and value.dim() and value.shape[0] == experts:
                    raise ValueError(
                        f"{name} {tuple(value.shape)} depends on the number of experts in a way that"
                        f" {type(module).__name__} does not declare: layer {layer.name} cannot be changed"
                    )


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)
