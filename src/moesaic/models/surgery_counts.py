"""Numbers beside the tensors: how many experts and how many a row takes, in modules and configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.models.adapters.product_keys import ProductKeys
from moesaic.models.handle import MoELayer, moe_layers
from moesaic.routing.state import StepCounter

NOTE = "moesaic_experts"  # field of the configuration where layers differ
_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "n_total_experts",
    "total_experts",
    "num_router_classes",
)
_IDENTITIES = ("zero_expert_num",)
_TOP_KS = ("top_k", "moe_top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def set_layer_counts(layer: MoELayer, sources: list[int], top_k: int | None, identities: int | None = None) -> None:
    """Bring the numbers in the modules of ``layer`` up to date.

    Args:
        layer: the handle from before the change.
        sources: old expert in each new place.
        top_k: experts a row takes now.
        identities: experts that return their input, where their number has changed.
    """
    before, after = layer.num_experts, len(sources)
    if layer.shell is None:
        _set_ours(layer, sources, top_k)
        return
    shell = layer.shell
    beyond = shell.choices - before
    fewer = 0 if identities is None else beyond - identities
    holds_top_k = shell.found.rule is not None and shell.found.rule.inverse_top_k and shell.block_factor != 1.0
    within = shell.experts.module.children() if not isinstance(shell.experts.module, nn.ModuleDict) else ()
    for module in {id(m): m for m in (shell.router, shell.experts.module, shell.block, *within)}.values():
        for name in _COUNTS:
            value = vars(module).get(name)
            if holds_top_k and module is shell.block and name == "num_experts":
                if top_k is not None:
                    setattr(module, name, top_k)
            elif isinstance(value, int) and value >= before:
                more = fewer if fewer and value == before + beyond else 0  # a number that counts all choices
                setattr(module, name, value + after - before - more)
        for name in _TOP_KS:
            if top_k is not None and vars(module).get(name) == layer.top_k:
                setattr(module, name, top_k)
        if identities is not None:
            for name in _IDENTITIES:
                if isinstance(vars(module).get(name), int):
                    setattr(module, name, identities)
        if isinstance(module, nn.Embedding):
            module.num_embeddings = int(module.weight.shape[0])
    if isinstance(shell.exchange, ProductKeys):
        setattr(shell.block, "num_keys", math.isqrt(after))  # noqa: B010
    for linear in shell.router.modules():
        if isinstance(linear, nn.Linear):
            linear.out_features = int(linear.weight.shape[0])


def keeps_top_k(layer: MoELayer) -> bool:
    """Whether the router has its own top-k; otherwise it reads the configuration at each call."""
    holders: tuple[Any, ...] = (layer.router,)
    if layer.shell is not None:
        holders = (layer.shell.router, layer.shell.block)
    return any(vars(holder).get(name) == layer.top_k for holder in holders for name in _TOP_KS)


Numbers = Mapping[str, tuple[int, int | None]]  # layer name -> (experts, top-k)


def set_config_counts(model: nn.Module, holders: Sequence[Any], before: Numbers, after: Numbers) -> None:
    """Bring configuration and outer modules up to date where all layers agree, and note the layers where they differ.

    Args:
        model: after the change of its layers.
        holders: what :func:`count_holders` found before the change.
        before: the numbers of every layer before.
        after: and now.
    """
    counts, top_ks = {numbers[0] for numbers in after.values()}, {numbers[1] for numbers in after.values()}
    count = next(iter(counts)) if len(counts) == 1 else None
    top_k = next(iter(top_ks)) if len(top_ks) == 1 else None
    old_top_ks = {numbers[1] for numbers in before.values()} - {None}
    for holder in holders:
        stated = stated_counts(holder)
        if count is not None:
            for name in stated:
                setattr(holder, name, count)
        if top_k is not None and (stated or isinstance(holder, nn.Module)):
            for name in _TOP_KS:
                if name == "top_k" and not isinstance(holder, nn.Module):
                    continue  # in a configuration that is a setting of text generation
                if vars(holder).get(name) in old_top_ks:
                    setattr(holder, name, top_k)
            spec = getattr(holder, "router", None)
            if isinstance(spec, dict) and "top_k" in spec:
                holder.router = {**spec, "top_k": top_k}
    config = getattr(model, "config", None)
    if config is not None:
        if count is None or len(top_ks) > 1:
            setattr(config, NOTE, note_of(model, after))
        elif hasattr(config, NOTE):
            delattr(config, NOTE)


def set_identity_counts(holders: Sequence[Any], count: int) -> None:
    """Bring the number of experts that return their input up to date in configurations and outer modules."""
    for holder in holders:
        for name in _IDENTITIES:
            if isinstance(vars(holder).get(name), int):
                setattr(holder, name, count)


def numbers_of(layers: Sequence[MoELayer]) -> dict[str, tuple[int, int | None]]:
    """Experts and top-k of each layer."""
    return {layer.name: (layer.num_experts, layer.top_k) for layer in layers}


def note_of(model: nn.Module, numbers: Numbers) -> dict[str, Any]:
    """What the configuration carries where layers differ: the numbers of each, and where the model's class lives.

    A block that several layers share is named once for each: a file opens it as copies.
    """
    of_module = {id(model.get_submodule(name)): found for name, found in numbers.items()}
    layers = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in of_module:
            layers[name] = dict(zip(("num_experts", "top_k"), of_module[id(module)], strict=True))
    return {"module": type(model).__module__, "layers": layers}


def count_holders(model: nn.Module) -> list[Any]:
    """Configurations, and modules around the MoE layers, that may state numbers of experts."""
    inner = {id(part) for layer in moe_layers(model) for part in layer.module.modules()}
    around = [m for m in model.modules() if id(m) not in inner and any(id(child) in inner for child in m.modules())]
    return [*configurations(model), *around]


def stated_counts(holder: Any) -> dict[str, int]:
    """Fields of a configuration or module that state a number of experts."""
    names = [name for name in _COUNTS if isinstance(vars(holder).get(name), int)]
    return {name: int(getattr(holder, name)) for name in names}


def configurations(model: nn.Module) -> Iterator[Any]:
    """Configurations that the MoE layers read: that of the model, of its text side, and those held by modules."""
    seen: set[int] = set()
    holders: list[Any] = []
    inner = {id(part) for layer in moe_layers(model) for part in layer.module.modules()}
    for module in model.modules():
        if id(module) in inner or any(id(child) in inner for child in module.modules()):
            holders.append(getattr(module, "config", None))
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    named = (config, text() if callable(text) else None, *holders)
    inside = [vars(one).get("ffn_config") for one in named if one is not None and not isinstance(one, dict)]
    for found in (*named, *inside):
        if found is not None and not isinstance(found, dict) and id(found) not in seen:
            seen.add(id(found))
            yield found


def _set_ours(layer: MoELayer, sources: list[int], top_k: int | None) -> None:
    moe = layer.module
    assert isinstance(moe, MoE)
    roots = [root for root in (moe.experts, moe.router) if root is not None]
    modules: list[Any] = [module for root in roots for module in root.modules()]
    for module in modules:
        if vars(module).get("num_experts") == layer.num_experts:
            module.num_experts = len(sources)
        for name, value in list(vars(module).items()):
            if isinstance(value, StepCounter) and value.size == layer.num_experts:
                setattr(module, name, StepCounter(len(sources)))
    if isinstance(moe.experts, FFNExperts) and moe.experts.widths is not None:
        moe.experts.widths = tuple(moe.experts.widths[source] for source in sources)
    router: Any = moe.router
    if router is not None and top_k is not None and vars(router).get("top_k") is not None:
        router.top_k = top_k
