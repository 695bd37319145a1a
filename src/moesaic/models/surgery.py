"""Drop, reorder, duplicate and merge experts of any model: every tensor and number that counts experts follows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.models.expert_index import ExpertTensor, expert_tensors
from moesaic.models.handle import MoELayer, moe_layers, select_layers
from moesaic.models.surgery_checks import (
    check_adapters,
    check_ids,
    check_sources,
    check_tensors,
    choices_of,
    group_limit,
    moved_table,
)
from moesaic.models.surgery_counts import (
    count_holders,
    keeps_top_k,
    numbers_of,
    set_config_counts,
    set_identity_counts,
    set_layer_counts,
)

_log = logging.getLogger("moesaic.models.surgery")

Choice = Sequence[int] | Mapping[int | str, Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class IndexMap:
    """How one tensor was rearranged; optimizer state and lineage follow the same map.

    Args:
        name: path of the tensor in the model.
        tensor: the tensor, which has its new shape.
        axes: axes that were indexed.
        index: old place of each new place along them.
        size: places before.
    """

    name: str
    tensor: Tensor
    axes: tuple[int, ...]
    index: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """What happened to one layer: the old expert in each new place, and its numbers before and after."""

    name: str
    index: int
    sources: tuple[int, ...]
    num_experts: tuple[int, int]
    top_k: tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Surgery:
    """A structural change that was made.

    Args:
        layers: each layer concerned.
        maps: each tensor that moved; see :func:`~moesaic.models.surgery_optimizer.remap_optimizer`.
        bytes: size of the tensors that moved, before and after.
    """

    layers: tuple[LayerChange, ...]
    maps: tuple[IndexMap, ...]
    bytes: tuple[int, int]

    def __str__(self) -> str:
        experts = [sum(layer.num_experts[when] for layer in self.layers) for when in (0, 1)]
        size = " -> ".join(f"{count / 1e6:.1f} MB" for count in self.bytes)
        return f"{len(self.layers)} layers, {experts[0]} -> {experts[1]} experts, {len(self.maps)} tensors, {size}"


def drop_experts(
    model: nn.Module, experts: Choice, *, clamp_k: bool = False, redirect: Mapping[int, int] | None = None
) -> Surgery:
    """Remove experts; the others keep their order. Equal to masking the dropped ones out of the router's choice.

    Everything is checked before the first tensor moves, so a refusal changes nothing. Ask :func:`moe_layers` for new
    handles afterwards.

    Args:
        model: a model of ours or of transformers, changed in place.
        experts: ids to remove from every layer, or layer (index or name) -> ids. Experts that return their input have
            the ids behind the others; they can go from all layers alike.
        clamp_k: where fewer experts than top-k remain, lower top-k instead of refusing.
        redirect: for layers whose experts come from a table of tokens: dropped expert -> remaining one that takes over.

    Returns:
        What was changed.

    Raises:
        ValueError: ids that are none, repeat or are not there; all experts of a layer; fewer than top-k; routing groups
            that would be unequal or too small; quantized, offloaded, adapted or unknown tensors, named.
    """
    sources: dict[int | str, list[int]] = {}
    identities: dict[int, list[int]] = {}
    for layer, ids in _per_layer(model, experts):
        choices = choices_of(layer)
        gone = set(check_ids(layer, ids, "experts", choices))
        sources[layer.index] = [i for i in range(layer.num_experts) if i not in gone]
        identities[layer.index] = [i for i in range(layer.num_experts, choices) if i not in gone]
        if not sources[layer.index]:
            raise ValueError(f"all {layer.num_experts} experts of layer {layer.name} would be dropped: keep at least 1")
    return rearrange_experts(model, sources, clamp_k=clamp_k, redirect=redirect, _identities=identities)


def reorder_experts(model: nn.Module, order: Choice) -> Surgery:
    """Give experts new places; the model computes the same.

    Args:
        model: see :func:`drop_experts`.
        order: the old expert in each new place, for every layer or layer -> order. Routing groups may be reordered
            inside, and as whole groups.

    Raises:
        ValueError: an order that leaves an expert out, or mixes routing groups; what :func:`drop_experts` refuses.
    """
    sources: dict[int | str, list[int]] = {}
    for layer, ids in _per_layer(model, order):
        sources[layer.index] = check_ids(layer, ids, "order")
        if len(ids) != layer.num_experts:
            raise ValueError(f"order of layer {layer.name} has {len(ids)} of {layer.num_experts} experts: name each")
    return rearrange_experts(model, sources)


def duplicate_experts(model: nn.Module, experts: Choice) -> Surgery:
    """Add a copy of each expert named, at the end (behind its own routing group's experts where there are groups).

    A copy has its source's weights, router row, biases and scales, so it gets the same logit and either computes the
    same. A row that chose the source now may choose both, which takes a slot from another expert: logits of the model
    stay the same only where the weights do (all experts doubled together with top-k, softmax or renormalised weights).
    Where a family keeps a module for each expert a copy is a new module, whose parameters an optimizer does not know.

    Args:
        model: see :func:`drop_experts`.
        experts: ids to copy in every layer, or layer -> ids.

    Raises:
        ValueError: a choice that leaves groups unequal; what :func:`drop_experts` refuses.
    """
    sources: dict[int | str, list[int]] = {}
    for layer, ids in _per_layer(model, experts):
        copies = check_ids(layer, ids, "experts")
        limit = group_limit(layer)
        size = layer.num_experts // (1 if limit is None else limit.count)
        sources[layer.index] = [
            source
            for start in range(0, layer.num_experts, size)
            for source in (*range(start, start + size), *(i for i in copies if start <= i < start + size))
        ]
    return rearrange_experts(model, sources)


def merge_experts(
    model: nn.Module,
    groups: Mapping[int | str, Sequence[Sequence[int]]],
    weights: Mapping[int | str, Sequence[float]] | None = None,
    *,
    clamp_k: bool = False,
) -> Surgery:
    """Replace groups of experts by their weighted mean; the router keeps the row of each group's first member.

    Args:
        model: see :func:`drop_experts`.
        groups: layer -> groups of ids; experts in no group stay as they are, at their place.
        weights: layer -> a number for each of the E experts, its share inside its group; equal shares by default.
        clamp_k: see :func:`drop_experts`.

    Raises:
        ValueError: an expert in two groups, shares that are negative or sum to 0; what :func:`drop_experts` refuses.
    """
    sources: dict[int | str, list[int]] = {}
    mixes: dict[int, Tensor] = {}
    layers = {layer.index: layer for layer in moe_layers(model)}
    chosen = [(select_layers(model, [key])[0].index, key) for key in groups]
    for index, key in chosen:
        layer = layers[index]
        flat = check_ids(layer, [i for group in groups[key] for i in group], "groups")
        leader = {i: group[0] for group in groups[key] for i in group}
        share = [1.0] * layer.num_experts if weights is None or key not in weights else list(weights[key])
        if len(share) != layer.num_experts or min(share) < 0 or not all(map(_finite, share)):
            raise ValueError(f"weights of layer {layer.name} must be {layer.num_experts} finite numbers >= 0")
        sources[index] = [i for i in range(layer.num_experts) if leader.get(i, i) == i]
        mix = torch.zeros(len(sources[index]), layer.num_experts, dtype=torch.float64)
        for row, source in enumerate(sources[index]):
            members = [i for i in flat if leader[i] == source] or [source]
            total = sum(share[i] for i in members) if len(members) > 1 else 1.0
            if total <= 0:
                raise ValueError(f"weights of layer {layer.name} sum to 0 over the group {members}")
            for i in members:
                mix[row, i] = share[i] / total if len(members) > 1 else 1.0
        mixes[index] = mix
    return rearrange_experts(model, sources, clamp_k=clamp_k, _mixes=mixes)


@torch.no_grad()
def rearrange_experts(
    model: nn.Module,
    sources: Mapping[int | str, Sequence[int]],
    *,
    clamp_k: bool = False,
    redirect: Mapping[int, int] | None = None,
    _mixes: Mapping[int, Tensor] | None = None,
    _identities: Mapping[int, Sequence[int]] | None = None,
) -> Surgery:
    """The general change: for each layer, the old expert in each new place. Experts may be missing or repeat.

    Layers may end with different numbers of experts. The balance loss of transformers (``output_router_logits``) stacks
    layers and does not run then; save such a model with :func:`~moesaic.models.saving.save`.

    Args:
        model: see :func:`drop_experts`.
        sources: layer (index or name) -> old ids.
        clamp_k: see :func:`drop_experts`.
        redirect: see :func:`drop_experts`.

    Raises:
        ValueError: see :func:`drop_experts`.
    """
    plans = [
        _plan(model, layer, ids, clamp_k, redirect, None if _identities is None else _identities[layer.index])
        for layer, ids in _per_layer(model, sources)
    ]
    _check_together(model, plans)
    before, holders = numbers_of(moe_layers(model)), count_holders(model)
    maps: list[IndexMap] = []
    changes: list[LayerChange] = []
    sizes = [0, 0]
    done: set[int] = set()
    for plan in plans:
        layer, mix = plan.layer, None if _mixes is None else _mixes[plan.layer.index]
        fresh = [
            (item, _moved(item, plan, mix))
            for item in plan.tensors
            if id(item.tensor) not in done and item.part != "module"
        ]
        for item, value in fresh:
            done.add(id(item.tensor))
            sizes[0] += item.tensor.numel() * item.tensor.element_size()
            sizes[1] += value.numel() * value.element_size()
            if item.axes:
                index = item.index(plan.sources, layer.num_experts, plan.identities)
                maps.append(IndexMap(item.name, item.tensor, item.axes, index, item.places(layer.num_experts)))
            item.tensor.grad = None
            item.tensor.data = value
        if layer.shell is not None and any(item.part == "module" for item in plan.tensors):
            bank = layer.shell.experts
            sizes[0] += _bytes(bank.module)
            bank.rearrange(plan.sources, mix)
            sizes[1] += _bytes(bank.module)
        set_layer_counts(layer, plan.sources, plan.top_k, None if plan.identities is None else len(plan.identities))
        changes.append(
            LayerChange(
                layer.name,
                layer.index,
                tuple(plan.sources),
                (layer.num_experts, len(plan.sources)),
                (layer.top_k, plan.top_k),
            )
        )
    after = before | {plan.layer.name: (len(plan.sources), plan.top_k) for plan in plans}
    set_config_counts(model, holders, before, after)
    if plans[0].identities is not None:
        set_identity_counts(holders, len(plans[0].identities))
    result = Surgery(tuple(changes), tuple(maps), (sizes[0], sizes[1]))
    _log.info("experts rearranged: %s", result)
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    layer: MoELayer
    sources: list[int]
    top_k: int | None
    tensors: list[ExpertTensor]
    tables: dict[str, Tensor]
    identities: list[int] | None  # old ids of experts that return their input and stay; None where all do


def _plan(
    model: nn.Module,
    layer: MoELayer,
    ids: Sequence[int],
    clamp_k: bool,
    redirect: Mapping[int, int] | None,
    identities: Sequence[int] | None,
) -> _Plan:
    sources = [int(i) for i in ids]
    check_ids(layer, list(dict.fromkeys(sources)), "sources")
    check_adapters(model, layer)
    tensors = expert_tensors(layer)
    check_tensors(model, layer, tensors)
    beyond = choices_of(layer) - layer.num_experts
    kept = None if identities is None or len(identities) == beyond else list(identities)
    top_k = check_sources(layer, sources, clamp_k, beyond if kept is None else len(kept))
    if layer.shell is not None:
        layer.shell.exchange.check_sources(layer.name, sources, layer.num_experts)
    taken = dict(redirect or {})
    for expert in (*taken, *taken.values()):
        check_ids(layer, [expert], "redirect")
    tables = {
        item.name: moved_table(item, sources, layer.num_experts, taken) for item in tensors if item.part == "table"
    }
    return _Plan(layer, sources, top_k, tensors, tables, kept)


def _check_together(model: nn.Module, plans: Sequence[_Plan]) -> None:
    of_tensor: dict[int, _Plan] = {}
    for plan in plans:
        for item in plan.tensors:
            other = of_tensor.setdefault(id(item.tensor), plan)
            if other.sources != plan.sources:
                raise ValueError(
                    f"{item.name} is shared by layers {other.layer.name} and {plan.layer.name}:"
                    " give both the same change"
                )
    planned = {plan.layer.index for plan in plans}
    for layer in moe_layers(model):
        for name, value in layer.module.named_parameters():
            if layer.index not in planned and id(value) in of_tensor:
                raise ValueError(
                    f"{layer.name}.{name} is shared by layers {of_tensor[id(value)].layer.name} and {layer.name}: give"
                    " both the same change"
                )
    everywhere = {layer.index for layer in moe_layers(model)} == planned
    kept = [None if plan.identities is None else len(plan.identities) for plan in plans]
    if any(count is not None for count in kept) and (not everywhere or len(set(kept)) > 1):
        raise ValueError(
            "experts that return their input are counted once for all layers in the configuration: drop as many of them"
            " in every layer"
        )
    for plan in plans:
        if plan.top_k == plan.layer.top_k or keeps_top_k(plan.layer):
            continue
        if not everywhere or len({other.top_k for other in plans}) > 1:
            raise ValueError(
                f"layer {plan.layer.name} reads its top-k from the configuration, which holds one for all layers: it"
                " cannot be lowered in some layers only"
            )


def _bytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in module.parameters())


def _moved(item: ExpertTensor, plan: _Plan, mix: Tensor | None) -> Tensor:
    if item.part == "table":
        return plan.tables[item.name]
    value = item.tensor.detach()
    places = item.index(plan.sources, plan.layer.num_experts, plan.identities)
    index = torch.tensor(places, dtype=torch.int64, device=value.device)
    for axis in item.axes:
        value = value.index_select(axis, index)
    if mix is not None and item.part == "bank":
        of_each = item.tensor.detach().reshape(-1, item.rows, *item.tensor.shape[1:])
        for row in (mix > 0).sum(1).gt(1).nonzero().flatten().tolist():
            members = mix[row].nonzero().flatten().tolist()
            mean = torch.stack([float(mix[row, i]) * of_each[i].double() for i in members]).sum(0)
            value[row * item.rows : (row + 1) * item.rows] = mean.to(value.dtype)
    return value.contiguous()


def _per_layer(model: nn.Module, choice: Choice) -> list[tuple[MoELayer, Sequence[int]]]:
    """Handle and choice of each layer concerned, in the model's order."""
    if not isinstance(choice, Mapping):
        return [(layer, choice) for layer in moe_layers(model)]
    found: dict[int, tuple[MoELayer, Sequence[int]]] = {}
    for key, ids in choice.items():
        layer = select_layers(model, [key])[0]
        if layer.index in found:
            raise ValueError(f"layer {layer.name} is named twice")
        found[layer.index] = (layer, ids)
    if not found:
        raise ValueError("no layer is named: give layer -> experts, or a list of experts for every layer")
    return [found[index] for index in sorted(found)]


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
