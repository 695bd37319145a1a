"""Roles of the parameters of any model: what nobody declared in a foreign MoE layer is read from its handle."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from torch import nn

from moesaic.models.handle import MoELayer, moe_layers
from moesaic.routing import ParameterSpec, parameter_specs

_log = logging.getLogger("moesaic.models.roles")

_BACK = re.compile(r"(down|out|wo|w2|fc2|output)[^.]*$")  # what maps back to the model's width
_ROUTES = re.compile(r"router|gate\.weight|keys")


def model_parameter_specs(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """:func:`~moesaic.routing.parameter_specs`, with foreign MoE layers under the rules of our own.

    In a layer that :func:`~moesaic.models.handle.moe_layers` finds, matrices of the router are ``router``, stacked
    experts ``expert-in`` (what reads the model's width; gate and up in one tensor are one matrix) and ``expert-out``,
    with their axes in the order of storage, and experts' biases (E, F) ``expert-bias``. All else is as before.

    Args:
        model: ours, of transformers, or any module; one without MoE layers too.
    """
    known: dict[int, ParameterSpec] = {}
    for layer in _layers(model):
        known.update(_foreign(layer))
    for name, parameter, spec in parameter_specs(model):
        yield name, parameter, known.get(id(parameter), spec)


def _layers(model: nn.Module) -> list[MoELayer]:
    try:
        return moe_layers(model)
    except ValueError as error:
        # No MoE layer at all, or a structure that is not known: its parameters keep what their modules say.
        _log.info("roles of parameters are read without MoE handles: %s", error)
        return []


def _foreign(layer: MoELayer) -> Iterator[tuple[int, ParameterSpec]]:
    if layer.shell is None:
        return
    router, bank = (getattr(part, "module", None) for part in (layer.router, layer.experts))
    if isinstance(router, nn.Module):
        for name, parameter in router.named_parameters():
            if router is layer.module and not _ROUTES.search(name):
                continue  # one module for all: names tell its parts apart
            if "bias" in name.rpartition(".")[2]:  # of one axis or written as (1, E)
                yield id(parameter), ParameterSpec(("out",) * parameter.dim(), "bias")
            elif parameter.dim() >= 2:
                yield id(parameter), ParameterSpec(("out", "in"), "router")
    if isinstance(bank, nn.Module):
        for name, parameter in bank.named_parameters():
            rows = isinstance(bank.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            if rows:  # an expert is a row of each table
                role = "expert-out" if "up" in name else "expert-in"
                yield id(parameter), ParameterSpec(("expert", "model"), role)
            elif bank is layer.module and parameter.dim() != 3:
                continue  # the bank is not a module of its own: what is stacked are the experts
            elif (spec := _of_bank(layer, name, parameter)) is not None:
                yield id(parameter), spec


def _of_bank(layer: MoELayer, name: str, parameter: nn.Parameter) -> ParameterSpec | None:
    back = _BACK.search(name.removesuffix("_bias").removesuffix(".weight").removesuffix(".bias")) is not None
    role = "expert-out" if back else "expert-in"
    if parameter.dim() == 2 and "bias" in name:
        return ParameterSpec(("expert", "out" if back else "width"), "expert-bias")
    turned = bool(getattr(layer.experts, "transposed", False))
    if name.rpartition(".")[2] == "w2" and parameter.dim() == 2:
        turned = True  # all experts in one matrix (dbrx): (E * F, D)
    pair = ("out", "width") if back else ("width", "model")
    pair = (pair[1], pair[0]) if turned else pair
    if parameter.dim() == 3:
        return ParameterSpec(("expert", *pair), role)
    return ParameterSpec(pair, role) if parameter.dim() == 2 else None
