"""The stock shape for a model whose layers differ: padding experts that no row can choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moesaic.models.adapters.weights import ForeignExperts
from moesaic.models.expert_index import ExpertTensor, expert_tensors
from moesaic.models.handle import MoELayer, moe_layers
from moesaic.models.surgery_checks import group_limit
from moesaic.models.surgery_counts import count_holders, numbers_of, set_config_counts, set_layer_counts, stated_counts

NEVER = -1e9  # added to a score: below any other, exactly 0 after a softmax, and finite in bf16


@contextmanager
@torch.no_grad()
def padded(model: nn.Module) -> Iterator[None]:
    """Every layer padded to the largest count of experts, for the duration of the block.

    A padding expert has zero weights and a bias of -1e9 where the router has one bias an expert: in a softmax its
    probability is exactly 0, and a bias for choosing only, beside sigmoid scores, keeps it out of the choice.

    Args:
        model: changed inside the block, restored after it.

    Raises:
        ValueError: layers of different top-k; a router without a bias for each expert, or with groups, whose padding
            could be chosen.
    """
    layers = moe_layers(model)
    largest = max(layer.num_experts for layer in layers)
    short = [layer for layer in layers if layer.num_experts < largest]
    if len({layer.top_k for layer in layers}) > 1:
        raise ValueError(
            f"masked=True: layers take {[layer.top_k for layer in layers]} experts a row, stock models one"
        )
    for layer in short:
        _check(layer)
    before, holders = numbers_of(layers), count_holders(model)
    wide = {name: (largest, top_k) for name, (_, top_k) in before.items()}
    stated = [(holder, stated_counts(holder)) for holder in holders]
    saved: list[tuple[Tensor, Tensor]] = []
    widened: list[MoELayer] = []
    try:
        for layer in short:
            for item in expert_tensors(layer):
                saved.append((item.tensor, item.tensor.data))
                item.tensor.data = _padded(item, layer, largest)
            set_layer_counts(layer, [0] * largest, layer.top_k)
            widened.append(layer)
        set_config_counts(model, holders, before, wide)
        yield
    finally:
        for tensor, data in saved:
            tensor.data = data
        for layer in widened:
            _restore_counts(layer, largest)
        set_config_counts(model, holders, wide, before)
        for holder, counts in stated:
            for name, count in counts.items():
                setattr(holder, name, count)


def _check(layer: MoELayer) -> None:
    if layer.shell is None:
        raise ValueError("masked=True: stock tools open no model of moesaic; save without masked, or export it")
    if type(layer.shell.experts) is not ForeignExperts:
        raise ValueError(
            f"masked=True: layer {layer.name} keeps its experts in a form that cannot be padded. Keep the same number"
            " in every layer, or save without masked (moesaic.load opens that)"
        )
    limit = group_limit(layer)
    rule = layer.shell.found.rule
    inside = any(_is_bias(item) and item.name.endswith(".bias") for item in expert_tensors(layer))  # of the logits
    chosen = rule is not None and rule.selection is not None and rule.selection.bias is not None
    # A bias for choosing only leaves the padding in the softmax: scores shrink and biases do not, so others are chosen.
    fits = inside or (chosen and rule is not None and rule.score != "softmax")
    if limit is not None or not fits:
        why = "chooses inside groups" if limit is not None else "has no bias that keeps an expert out of its scores"
        raise ValueError(
            f"masked=True: layer {layer.name} {why}, so {layer.num_experts} experts cannot be padded with ones that are"
            " never chosen. Keep the same number in every layer, or save without masked (moesaic.load opens that)"
        )


def _is_bias(item: ExpertTensor) -> bool:
    return item.part == "router" and "bias" in item.name.rpartition(".")[2]


def _padded(item: ExpertTensor, layer: MoELayer, largest: int) -> Tensor:
    value = item.tensor.detach()
    missing = largest - layer.num_experts
    for axis in item.axes:
        experts = value.narrow(axis, 0, layer.num_experts)
        tail = value.narrow(axis, layer.num_experts, item.tail)
        shape = list(value.shape)
        shape[axis] = missing
        never = max(NEVER, torch.finfo(value.dtype).min / 2) if _is_bias(item) else 0.0
        fill = value.new_full(shape, never)
        value = torch.cat([experts, fill, tail], axis)
    return value


def _restore_counts(layer: MoELayer, largest: int) -> None:
    wide = dataclasses.replace(layer, num_experts=largest)
    set_layer_counts(wide, list(range(layer.num_experts)), layer.top_k)
