"""What is refused before the first tensor moves: choices that do not fit, weights that cannot be cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.expert_index import ExpertTensor
from moesaic.models.handle import MoELayer

_ADAPTED = ("lora_A", "base_layer", "parametrizations")
_GROUPS = ("num_groups", "num_group", "n_group", "n_groups", "num_expert_group")
_KEPT = ("top_groups", "topk_group", "top_k_group", "topk_groups")


@dataclasses.dataclass(frozen=True)
class GroupLimit:
    """Routing groups of a layer: how many, how many a row may use, and the smallest size that its scoring allows."""

    count: int
    kept: int
    smallest: int


def group_limit(layer: MoELayer) -> GroupLimit | None:
    """Routing groups of ``layer``, or None where any expert may be chosen beside any other."""
    if layer.shell is None:
        router: Any = layer.router
        best = 1
    else:
        router = layer.shell.router
        rule = layer.shell.found.rule
        limit = None if rule is None or rule.selection is None else rule.selection.groups
        best = 2 if limit is None else limit.best
        if rule is not None and rule.selection is not None and limit is None:
            return None
    count = next((getattr(router, name) for name in _GROUPS if isinstance(getattr(router, name, None), int)), 1)
    kept = next((getattr(router, name) for name in _KEPT if isinstance(getattr(router, name, None), int)), count)
    return GroupLimit(count, kept, best) if count > 1 else None


def choices_of(layer: MoELayer) -> int:
    """What a row of ``layer`` can choose from: its experts, and behind them those that return their input."""
    return layer.num_experts if layer.shell is None else layer.shell.choices


def check_ids(layer: MoELayer, ids: Sequence[int], argument: str, below: int | None = None) -> list[int]:
    """``ids`` as plain integers of experts of ``layer``.

    Args:
        layer: the layer.
        ids: what was given.
        argument: its name, for messages.
        below: ids lie below this; the number of experts by default.

    Raises:
        ValueError: none, one that is no expert, or one twice.
    """
    plain = [int(i) for i in ids]
    below = layer.num_experts if below is None else below
    bad = [i for i in plain if not 0 <= i < below]
    if bad:
        raise ValueError(f"{argument} of layer {layer.name} holds {bad[0]}; experts are 0..{below - 1}")
    twice = sorted({i for i in plain if plain.count(i) > 1})
    if twice:
        raise ValueError(f"{argument} of layer {layer.name} names {twice} more than once")
    if not plain:
        raise ValueError(f"{argument} of layer {layer.name} is empty; leave the layer out instead")
    return plain


def check_sources(layer: MoELayer, sources: Sequence[int], clamp_k: bool, identities: int = 0) -> int | None:
    """The top-k of ``layer`` after a change to ``sources`` (the old expert in each new place).

    Args:
        layer: before the change.
        sources: old experts.
        clamp_k: whether top-k may fall.
        identities: experts that return their input, which a row may choose beside the others.

    Raises:
        ValueError: fewer experts than top-k, groups that would mix or become too small; with what would do.
    """
    top_k, after = layer.top_k, len(sources)
    limit = group_limit(layer)
    available = after + identities
    if limit is not None:
        _check_groups(layer, sources, limit)
        available = limit.kept * (after // limit.count)
    if top_k is None or available >= top_k:
        return top_k
    if not clamp_k:
        where = f" in the {limit.kept} groups that a row may use" if limit is not None else ""
        raise ValueError(
            f"layer {layer.name} takes {top_k} experts a row and only {available} of {layer.num_experts} would remain"
            f"{where}: keep more, or give clamp_k=True to lower its top-k to {available}"
        )
    if layer.shell is not None and layer.shell.found.rule is None:
        raise ValueError(f"layer {layer.name}: its top-k cannot be lowered: {layer.shell.found.reason}")
    return available


def _check_groups(layer: MoELayer, sources: Sequence[int], limit: GroupLimit) -> None:
    size = layer.num_experts // limit.count
    left = [sum(source // size == group for source in sources) for group in range(limit.count)]
    need = max(limit.smallest, -(-(layer.top_k or 1) // limit.kept))
    if len(set(left)) > 1 or left[0] == 0:
        raise ValueError(
            f"layer {layer.name} chooses inside {limit.count} groups of {size} neighbouring experts, which must stay"
            f" equally large; {left} would remain in them. Keep the same number of each, for example {max(left)} or"
            f" {max(need, min(left))}"
        )
    new = len(sources) // limit.count
    if new < limit.smallest:
        raise ValueError(
            f"layer {layer.name} scores a group by its {limit.smallest} best experts; {new} of each group would remain:"
            f" keep at least {need} of each group ({need * limit.count} of {layer.num_experts} experts)"
        )
    for group in range(limit.count):
        members = {source // size for source in sources[group * new : (group + 1) * new]}
        if len(members) > 1:
            raise ValueError(
                f"layer {layer.name} chooses inside groups of experts; the new places {group * new} to"
                f" {(group + 1) * new - 1} would mix the old groups {sorted(members)}, which changes the model:"
                " reorder inside groups, or whole groups"
            )


def check_tensors(model: nn.Module, layer: MoELayer, tensors: Sequence[ExpertTensor]) -> None:
    """Refuse weights whose rows cannot be moved.

    Raises:
        ValueError: quantized, sharded over devices, offloaded, or a router that is not finite; named.
    """
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    for item in tensors:
        value, kind = item.tensor, type(item.tensor).__name__
        if item.part != "table" and (not value.dtype.is_floating_point or value.element_size() < 2):
            raise ValueError(
                f"{item.name} is quantized ({value.dtype}): its rows cannot be moved without its scales. Load the"
                " checkpoint without quantization, change it, and quantize the result"
            )
        if kind not in ("Tensor", "Parameter"):
            raise ValueError(
                f"{item.name} is a {kind}, whose rows cannot be moved: load the model on one device without"
                f" quantization{f' ({method})' if method else ''} first"
            )
        if value.is_meta:
            raise ValueError(
                f"{item.name} is not in memory (offloaded, or built on the meta device): load the model without"
                " disk offload, or with a device_map that keeps it"
            )
        if item.part == "router" and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{item.name} holds NaN or inf: the router is damaged, nothing was changed")


def check_adapters(model: nn.Module, layer: MoELayer) -> None:
    """Refuse a layer whose router or experts an adapter changes (LoRA and others of peft, parametrizations).

    Asked before its tensors are looked at: an adapter's own would be taken for the router's.

    Raises:
        ValueError: naming the module, its class, and the adapters on it.
    """
    roots = [part for part in (_module(layer.router), _module(layer.experts)) if part is not None]
    inside = {id(module) for root in roots for module in root.modules()}
    for name, module in model.named_modules():
        if not any(hasattr(module, sign) for sign in _ADAPTED):
            continue
        if id(module) in inside or any(id(child) in inside for child in module.modules()):
            what, how = _adapter(module)
            raise ValueError(
                f"{name} ({type(module).__name__}) holds {what} on the router or the experts of layer {layer.name}, and"
                f" its tensors would not follow: merge it first ({how}), then change the experts"
            )


def _adapter(module: nn.Module) -> tuple[str, str]:
    """Which adapters ``module`` holds, and what merges them."""
    found: Any = getattr(module, "parametrizations", None)
    if found is not None:
        return f"a parametrization of {', '.join(found)}", "torch.nn.utils.parametrize.remove_parametrizations"
    named = getattr(module, "lora_A", None)
    if not isinstance(named, (dict, nn.ModuleDict, nn.ParameterDict)):
        named = getattr(module, "active_adapters", None) or ()
    names = ", ".join(repr(str(name)) for name in named)
    return f"the adapter {names}" if names else "an adapter", "merge_and_unload of peft, or merge"


def _module(part: Any) -> nn.Module | None:
    found = part if isinstance(part, nn.Module) else getattr(part, "module", None)
    return found if isinstance(found, nn.Module) else None


def moved_table(item: ExpertTensor, sources: Sequence[int], experts: int, redirect: dict[int, int]) -> Tensor:
    """A table of expert ids after the change.

    Args:
        item: the table.
        sources: old expert in each new place.
        experts: E before.
        redirect: old expert -> old expert that takes over its entries.

    Raises:
        ValueError: an entry names an expert that is gone and no other takes over.
    """
    new_of = {old: new for new, old in reversed(list(enumerate(sources)))}
    target = [new_of.get(redirect.get(old, old), -1) for old in range(experts)]
    if item.tensor.is_meta:
        return item.tensor
    moved = torch.tensor(target, device=item.tensor.device)[item.tensor.long()]
    if bool((moved < 0).any()):
        gone = sorted(set(item.tensor[moved < 0].tolist()))
        raise ValueError(
            f"{item.name} assigns tokens to the experts {gone}, which would be gone: keep them, or say who takes over"
            " by redirect={old expert: remaining expert}"
        )
    if moved.dim() == 2 and any(len(set(row)) < len(row) for row in moved.tolist()):
        raise ValueError(f"{item.name}: redirect gives some token the same expert twice; choose another")
    return moved.to(item.tensor.dtype)
