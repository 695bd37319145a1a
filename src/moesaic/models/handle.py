"""One handle per MoE layer, the same for our models and for foreign ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.experts import Experts
from moesaic.layers import MoE
from moesaic.models.adapters.bank import ForeignBank
from moesaic.models.adapters.discovery import find_shells
from moesaic.models.adapters.exchange import Produced
from moesaic.models.adapters.shell import Shell
from moesaic.routing import Context, Router, Routing


@dataclasses.dataclass(frozen=True, eq=False)
class WeightRule:
    """How a layer weighs a choice of experts.

    Args:
        description: one line for people.
        weigh: (logits_TE, ids_TK) -> weights_TK of any choice, the model's scale factor included; None where no rule
            reproduces the model's own weights.
        reason: why there is none.
    """

    description: str
    weigh: Callable[[Tensor, Tensor], Tensor] | None
    reason: str = ""


class ForeignRouter:
    """Contract 1 over a router of transformers: the module stays what it is, this reads it as score, choose, weigh.

    Args:
        shell: the layer that it belongs to.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.module = shell.router
        self.num_experts = shell.choices
        self.score_function = shell.score_function

    def score(self, x_TD: Tensor, context: Context | None = None) -> Tensor:
        """Logits (T, E) in the dtype that the model computes them in."""
        return self._shell.logits(self._alone(x_TD))[:, : self.num_experts]

    def choose(self, logits_TE: Tensor, context: Context | None = None, allowed_TE: Tensor | None = None) -> Tensor:
        """The model's own choice (T, K) if only ``allowed_TE`` existed; E where too few are allowed."""
        if allowed_TE is not None:
            logits_TE = self.restrict(logits_TE, allowed_TE)
        return self._shell.choose(logits_TE, allowed_TE)

    def restrict(self, logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
        """The logits that the model would form without the experts outside ``allowed_TE``: -inf for those."""
        return self._shell.restrict(logits_TE, allowed_TE)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context | None = None) -> Tensor:
        """Weights of a choice by the model's own rule, its scale factor included."""
        return self._shell.weigh(logits_TE, ids_TK)

    def __call__(self, x_TD: Tensor, context: Context | None = None) -> Routing:
        """The routing of ``x_TD`` (T, D) as the model chooses it."""
        return self._shell.decode(self._alone(x_TD), Context() if context is None else context)

    def _alone(self, x_TD: Tensor) -> Produced:
        return self._shell.exchange.alone(self.module, self._shell.block, x_TD)


@dataclasses.dataclass(frozen=True, eq=False)
class MoELayer:
    """A handle of one MoE layer.

    Args:
        name: path of the layer in the model.
        index: its place among the model's MoE layers, from 0 (dense layers do not count).
        num_experts: experts with weights.
        top_k: experts a row takes; None where the router takes a variable number.
        rule: how it weighs a choice.
        router: contract 1; None for a bank that routes itself.
        experts: contract 2.
        module: the layer's module.
        shell: translation of a foreign layer, None for ours.
    """

    name: str
    index: int
    num_experts: int
    top_k: int | None
    rule: WeightRule
    router: Router | ForeignRouter | None
    experts: Experts | ForeignBank
    module: nn.Module
    shell: Shell | None = None

    def __repr__(self) -> str:
        size = f"{self.num_experts} experts, top {self.top_k}"
        return f"MoELayer({self.index}: {self.name}, {size}; {self.rule.description})"


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of any model, in module order.

    Layers of ours are found by their class, those of transformers by their structure: mostly a bank with stacked
    weights (E, ...) beside a router that returns (logits, weights, ids). Nothing is skipped in silence.

    Args:
        model: a model of ours, one of transformers, or any module that holds such layers.

    Raises:
        ValueError: no MoE layer; a part that looks like one and has no known structure, named with what is missing.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found: dict[str, MoE | Shell] = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    found.update({shell.name: shell for shell in find_shells(model)})
    if not found:
        searched = sum(1 for _ in model.modules())
        raise ValueError(
            f"{type(model).__name__} has no MoE layer: searched {searched} modules for layers of moesaic (MoE) and for"
            " stacked experts (gate_up_proj or up_proj, and down_proj, of three axes) with a router beside them"
        )
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    names = sorted(found, key=lambda name: order[name])
    return [_handle(name, index, found[name]) for index, name in enumerate(names)]


def select_layers(model: nn.Module, layers: Sequence[int | str | MoELayer] | None) -> list[MoELayer]:
    """The handles that ``layers`` names.

    Args:
        model: see :func:`moe_layers`.
        layers: indices among the MoE layers (negative from the end), names or handles; None for all.

    Raises:
        ValueError: a layer that the model has not, or an empty choice.
    """
    found = moe_layers(model)
    if layers is None:
        return found
    chosen: dict[int, MoELayer] = {}
    for wanted in layers:
        key: Any = wanted.name if isinstance(wanted, MoELayer) else wanted
        match = [
            layer for layer in found if key in (layer.name, layer.index, layer.index - len(found)) and key is not True
        ]
        if not match:
            names = ", ".join(f"{layer.index}: {layer.name}" for layer in found)
            raise ValueError(f"layers names {key!r}; the model's MoE layers are {names}")
        chosen[match[0].index] = match[0]
    if not chosen:
        raise ValueError("layers is empty; give indices or names of MoE layers, or None for all")
    return [chosen[index] for index in sorted(chosen)]


def _handle(name: str, index: int, part: MoE | Shell) -> MoELayer:
    if isinstance(part, MoE):
        top_k = getattr(part.experts if part.router is None else part.router, "top_k", None)
        return MoELayer(name, index, part.experts.num_experts, top_k, _own_rule(part), part.router, part.experts, part)
    found = part.found
    if found.rule is not None:
        rule = WeightRule(_description(part), part.weigh)
    else:
        rule = WeightRule(f"unknown: {found.reason}", None, found.reason)
    top_k = found.top_k or getattr(part.router, "top_k", None)
    return MoELayer(
        name, index, part.experts.num_experts, top_k, rule, ForeignRouter(part), part.experts, part.block, part
    )


def _description(shell: Shell) -> str:
    factor = shell.block_factor
    return shell.rule.describe() + (f", times {factor:g} in the block" if factor != 1.0 else "")


def _own_rule(layer: MoE) -> WeightRule:
    router = layer.router if layer.router is not None else getattr(layer.experts, "router", None)
    if not isinstance(router, Router):
        who = type(layer.experts).__name__
        return WeightRule(f"{who} routes itself", None, f"{who} has no router that could weigh another choice")

    def weigh(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        with torch.autocast(logits_TE.device.type, enabled=False):
            return router.weigh(logits_TE, ids_TK, Context())

    return WeightRule(f"{type(router).__name__} ({router.score_function})", weigh)
