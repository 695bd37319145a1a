"""Another router on a trained model's own logits, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moesaic.layers.intervention import Call
from moesaic.models.handle import MoELayer, select_layers
from moesaic.models.override import override_routing
from moesaic.routing import Router, Routing

WEIGHTS = ("router", "model")


@contextmanager
def swap_routing(
    model: nn.Module,
    router: type[Router],
    *,
    weights: str = "router",
    layers: Sequence[int | str | MoELayer] | None = None,
    **options: Any,
) -> Iterator[nn.ModuleList]:
    """Let another kind of router choose inside the block, on the logits of the gates that the model was trained with.

    Training-free USMoE (arXiv:2503.22996) is ``swap_routing(model, PairChoiceRouter, allow_future=True)``. Nothing of
    the model changes: after the block its outputs are bit-identical to those before.

    Args:
        model: ours, or any family that :func:`~moesaic.models.moe_layers` knows.
        router: a class whose ``choose`` and ``weigh`` work on logits alone; its ``score`` is not used.
        weights: ``"router"`` weighs a choice by the new router's rule, ``"model"`` by the rule that the model was
            trained with (renormalised over the chosen experts, scaled ...).
        layers: indices, names or handles of MoE layers; all by default.
        **options: arguments of ``router`` beside the sizes.

    Yields:
        One router a layer, in evaluation mode. To set state that moves once per step, such as the threshold of
        ``grouping="causal"``, call ``routers.train()``, run the model on a few texts and call
        ``end_step(routers)``; then ``routers.eval()``.

    Raises:
        ValueError: an unknown ``weights``, a router that refuses its options or a causal model, layers without logits.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")
    chosen = select_layers(model, layers)
    routers = nn.ModuleList(_router(layer, router, options) for layer in chosen)
    by_layer = {layer.index: made for layer, made in zip(chosen, routers, strict=True)}

    def route(call: Call) -> Routing:
        made = by_layer[call.layer.index]
        assert isinstance(made, Router)
        return _decide(made, call, weights)

    with override_routing(model, route, layers=chosen):
        yield routers


def _router(layer: MoELayer, router: type[Router], options: dict[str, Any]) -> Router:
    choices = layer.num_experts if layer.shell is None else layer.shell.choices
    made = router(layer.experts.dim, choices, **options)
    made.check_causal()
    made.layer_name, made.layer_index = layer.name, layer.index
    return made.to(next(layer.module.parameters()).device).eval()


def _decide(router: Router, call: Call, weights: str) -> Routing:
    logits_TE = call.routing.logits_TE
    if logits_TE is None:
        raise ValueError(f"layer {call.layer.name} forms no logits, so no other router can choose on them")
    context = router.check_input(call.x_TD, call.context)
    with torch.autocast(logits_TE.device.type, enabled=False):
        logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
        if context.token_mask_T is not None:
            logits_TE = logits_TE.masked_fill(~context.token_mask_T[:, None], 0.0)
        banned_TE = logits_TE == -torch.inf  # by an override inside this one
        router.check_scores(logits_TE.masked_fill(banned_TE, 0.0), context)
        ids_TK = router.choose(logits_TE, context, ~banned_TE if bool(banned_TE.any()) else None)
        routing = router.decide(logits_TE, ids_TK, context)
        if router.counting():
            router.observe(routing)
    return routing if weights == "router" else call.choose(ids_TK=routing.expert_ids_TK)
