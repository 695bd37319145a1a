"""MoE layers of ours in the place of a transformers model's, to be trained there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moesaic.experts import FFNExperts
from moesaic.layers import BareMoE, MoE
from moesaic.models.handle import MoELayer, select_layers
from moesaic.routing import Routing


def replace_layers(
    model: nn.Module,
    make: Callable[[MoELayer], MoE],
    layers: Sequence[int | str | MoELayer] | None = None,
) -> list[MoE]:
    """Put an MoE of ours where ``model`` has an MoE block; it computes, trains, records and is overridden there.

    All new layers are made before the first block is taken out, so a refusal leaves the model as it was. The layers'
    losses reach the training engine, or whoever opens :func:`moesaic.layers.collect_routings`; call ``end_step(model)``
    after each optimizer step of a loop of your own. The checkpoint of such a model is its state dict: build the model
    again, replace its layers again, then load it.

    Args:
        model: a model of transformers with MoE blocks that take and return a bare tensor.
        make: handle of a block -> the layer in its place, for rows of the same width;
            :func:`trained_experts` gives the block's own experts as a bank of ours.
        layers: indices, names or handles of MoE layers; all by default.

    Returns:
        The new layers, in the model's order.

    Raises:
        ValueError: a layer that is an MoE of ours already; a block that returns no bare tensor, or that holds more than
            router and experts (a shared expert) where the new layer has no ``shared``; a layer of another width.
    """
    chosen = select_layers(model, layers)
    for layer in chosen:
        _check_block(layer)
    made = [_made(layer, make(layer)) for layer in chosen]
    for layer, moe in zip(chosen, made, strict=True):
        parent, _, name = layer.name.rpartition(".")
        setattr(model.get_submodule(parent), name, BareMoE(moe))
        moe.train(layer.module.training)
    return made


@torch.no_grad()
def trained_experts(layer: MoELayer) -> FFNExperts:
    """The experts of a block as a bank of ours with copies of their weights.

    Args:
        layer: a handle of a foreign block with gated SiLU experts (Qwen, Mixtral, OLMoE, DeepSeek ...).

    Raises:
        ValueError: experts that compute something else, as a comparison on random rows shows.
    """
    foreign = layer.experts
    weights = {name: value.detach() for name, value in foreign.weights().items()}
    if not {"gate", "up", "down"} <= set(weights):
        raise ValueError(f"experts of {layer.name} have {sorted(weights)}: only gated ones (gate, up, down) are copied")
    experts, width, dim = weights["up"].shape
    bank = FFNExperts(dim, width, experts, activation="swiglu", bias="down_bias" in weights)
    bank.to(device=weights["up"].device, dtype=weights["up"].dtype)
    names = {"gate": "gate_EFD", "up": "up_EFD", "down": "down_EDF"}
    names |= {"gate_bias": "gate_bias_EF", "up_bias": "up_bias_EF", "down_bias": "down_bias_ED"}
    for name, value in weights.items():
        bank.get_parameter(names[name]).copy_(value)
    _check_same(layer, bank)
    return bank


def _check_same(layer: MoELayer, bank: FFNExperts) -> None:
    generator = torch.Generator().manual_seed(0)
    like = bank.up_EFD
    x_TD = torch.randn(2 * bank.num_experts, bank.dim, generator=generator).to(like)
    ids_TK = torch.arange(bank.num_experts, device=like.device).repeat(2)[:, None]
    routing = Routing(ids_TK, torch.ones(ids_TK.shape, device=like.device), bank.num_experts)
    ours, theirs = bank(x_TD, routing).float(), layer.experts(x_TD, routing).float()
    tolerance = 1e-4 if like.dtype in (torch.float32, torch.float64) else 0.05
    if not torch.allclose(ours, theirs, atol=tolerance * float(theirs.abs().max()), rtol=tolerance):
        raise ValueError(
            f"experts of {layer.name} are no gated SiLU experts: a bank with a copy of their weights"
            f" differs by {float((ours - theirs).abs().max()):.2g} of {float(theirs.abs().max()):.2g}"
        )


def _check_block(layer: MoELayer) -> None:
    if layer.shell is None:
        raise ValueError(f"layer {layer.name} is an MoE of moesaic already: set its router or experts")
    if layer.shell.output_site is not layer.shell.block:
        raise ValueError(
            f"layer {layer.name} has no block of its own: its router hangs on {type(layer.module).__name__}"
        )
    like = next(layer.module.parameters())
    x_BSD = torch.zeros(1, 2, layer.experts.weights()["down"].shape[1], device=like.device, dtype=like.dtype)
    training = layer.module.training
    try:
        with torch.no_grad():
            y = layer.module.eval()(x_BSD)
    except TypeError as error:
        raise ValueError(f"block {layer.name} takes more than a tensor: {error}") from error
    finally:
        layer.module.train(training)
    if not isinstance(y, Tensor) or y.shape != x_BSD.shape:
        raise ValueError(
            f"block {layer.name} ({type(layer.module).__name__}) returns {type(y).__name__}, not one tensor"
        )


def _made(layer: MoELayer, moe: MoE) -> MoE:
    assert layer.shell is not None
    if not isinstance(moe, MoE):
        raise ValueError(f"make must return a moesaic.MoE for layer {layer.name}, got {type(moe).__name__}")
    weights = layer.experts.weights()["down"]
    if not moe.experts.dim == moe.experts.out_dim == weights.shape[1]:
        raise ValueError(
            f"layer {layer.name} maps width {weights.shape[1]} to itself, the new layer maps {moe.experts.dim} to"
            f" {moe.experts.out_dim}"
        )
    known = {id(p) for part in (layer.shell.router, layer.shell.experts.module) for p in part.parameters()}
    others = [name for name, p in layer.module.named_parameters() if id(p) not in known]
    if others and moe.shared is None:
        raise ValueError(
            f"block {layer.name} holds more than router and experts ({', '.join(others[:4])}): give the new layer a"
            " shared part in their place"
        )
    router = moe.router
    if router is not None:
        router.layer_name, router.layer_index = layer.name, layer.index
    return moe.to(device=weights.device, dtype=weights.dtype)
