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

    Softmax scores with a bias for choosing only (ERNIE 4.5) have no such place: a logit that is linear in the token is
    low for some tokens only, so padding takes a share of each token's scores, and the bias is compared with what is
    left. Where weights are renormalised this is exact in two cases: the bias is the same for all experts, so that only
    the order of the scores counts; or the count is m times the layer's own. Then the padding repeats the router's rows,
    every score is the m-th part of what it was for every token, and so is the bias.

    Args:
        model: changed inside the block, restored after it.

    Raises:
        ValueError: layers of different top-k; a router without a bias for each expert, or with groups, whose padding
            could be chosen; softmax scores with a bias for choosing in neither of the two cases.
    """
    layers = moe_layers(model)
    largest = max(layer.num_experts for layer in layers)
    short = [layer for layer in layers if layer.num_experts < largest]
    if len({layer.top_k for layer in layers}) > 1:
        raise ValueError(
            f"masked=True: layers take {[layer.top_k for layer in layers]} experts a row, stock models one"
        )
    repeats = {layer.name: _check(layer, largest) for layer in short}
    before, holders = numbers_of(layers), count_holders(model)
    wide = {name: (largest, top_k) for name, (_, top_k) in before.items()}
    stated = [(holder, stated_counts(holder)) for holder in holders]
    saved: list[tuple[Tensor, Tensor]] = []
    widened: list[MoELayer] = []
    try:
        for layer in short:
            for item in expert_tensors(layer):
                saved.append((item.tensor, item.tensor.data))
                item.tensor.data = _padded(item, layer, largest, repeats[layer.name])
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


def _check(layer: MoELayer, largest: int) -> int:
    """How often the router's rows are repeated, 1 where the padding's are zeros."""
    if layer.shell is None:
        raise ValueError("masked=True: stock tools open no model of moesaic; save without masked, or export it")
    if type(layer.shell.experts) is not ForeignExperts:
        raise ValueError(
            f"masked=True: layer {layer.name} keeps its experts in a form that cannot be padded. Keep the same number"
            " in every layer, or save without masked (moesaic.load opens that)"
        )
    limit = group_limit(layer)
    rule = layer.shell.found.rule
    biases = [item for item in expert_tensors(layer) if _is_bias(item)]
    inside = any(item.name.endswith(".bias") for item in biases)  # of the logits
    chosen = rule is not None and rule.selection is not None and rule.selection.bias is not None
    if limit is None and (inside or (chosen and rule is not None and rule.score != "softmax")):
        return 1
    why = "chooses inside groups" if limit is not None else "has no bias that keeps an expert out of its scores"
    if limit is None and chosen and rule is not None and not rule.renormalise:
        why = "weighs by softmax scores that are not renormalised, of which padding would take a share"
    if limit is None and chosen and biases and rule is not None and rule.renormalise:
        spread = max(float(item.tensor.max() - item.tensor.min()) for item in biases)
        if spread == 0:
            return 1
        if largest % layer.num_experts == 0:
            return largest // layer.num_experts
        why = (
            "chooses by softmax scores plus a bias: padding would take a share of the scores that differs from token to"
            f" token, and the bias, which differs by {spread:.3g} between experts, would be compared with the rest"
            f" ({largest} experts are no multiple of {layer.num_experts}, where shares are equal)"
        )
    raise ValueError(
        f"masked=True: layer {layer.name} {why}, so {layer.num_experts} experts cannot be padded with ones that are"
        " never chosen. Keep the same number in every layer, or save without masked (moesaic.load opens that)"
    )


def _is_bias(item: ExpertTensor) -> bool:
    return item.part == "router" and "bias" in item.name.rpartition(".")[2]


def _padded(item: ExpertTensor, layer: MoELayer, largest: int, repeats: int) -> Tensor:
    value = item.tensor.detach()
    missing = largest - layer.num_experts
    for axis in item.axes:
        experts = value.narrow(axis, 0, layer.num_experts)
        tail = value.narrow(axis, layer.num_experts, item.tail)
        shape = list(value.shape)
        shape[axis] = missing
        never = max(NEVER, torch.finfo(value.dtype).min / 2) if _is_bias(item) else 0.0
        fill = value.new_full(shape, never)
        if repeats > 1 and _is_bias(item):
            experts = experts / repeats
        elif repeats > 1 and item.part == "router":
            fill = torch.cat([experts] * (repeats - 1), axis)
        value = torch.cat([experts, fill, tail], axis)
    return value


def _restore_counts(layer: MoELayer, largest: int) -> None:
    wide = dataclasses.replace(layer, num_experts=largest)
    set_layer_counts(wide, list(range(layer.num_experts)), layer.top_k)
