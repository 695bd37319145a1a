"""``call.choose``: without an expert means the same as dropping it; keeping the scores is something else, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.models.surgery import drop_experts
from moesaic.models.surgery_checks import group_limit
from moesaic.models.swap import swap_routing
from moesaic.routing import (
    Context,
    CosineRouter,
    ExpertChoiceRouter,
    PairChoiceRouter,
    ReLURouter,
    Router,
    Routing,
    TopKRouter,
    TopPRouter,
)
from tests.models.families import EXPERTS, FAMILIES, build, run

CHOOSING = list(FAMILIES)
OWN_RULES = {"phimoe", "inkling"}  # weights by the order of the picks; a sum shared with experts that every row uses


def roomy(name: str, **changes: Any) -> tuple[nn.Module, list[int]]:
    """A float64 model, and experts that it can lose: one of each routing group, or two."""
    model = build(name, **changes)
    if group_limit(moe_layers(model)[0]) is not None:
        model = build(name, n_group=2, topk_group=1, **changes)
    for key, value in model.named_buffers():
        if "correction_bias" in key:  # axk2 gives other groups the score 0: below it ties would decide
            value.abs_()
    limit = group_limit(moe_layers(model)[0])
    single = [1, 5] if FAMILIES[name].form != "product keys" else list(FAMILIES[name].gone)
    gone = single if limit is None else [group * (EXPERTS // limit.count) + 1 for group in range(limit.count)]
    return model.double(), gone


def both_settings() -> list[Any]:
    """(name, norm_topk_prob), once where a family has no such setting."""
    found = []
    for name in CHOOSING:
        known = hasattr(build(name).config, "norm_topk_prob")
        found += [(name, True), (name, False)] if known and not name.endswith("_raw") else [(name, None)]
    return found


@pytest.mark.parametrize(("name", "norm"), both_settings())
@torch.no_grad()
@pytest.mark.case("C12", "C15")
def test_allowed_equals_dropping_the_others(name: str, norm: bool | None) -> None:
    model, gone = roomy(name, **({} if norm is None else {"norm_topk_prob": norm}))
    if norm is not None and name not in ("deepseek_v2", "doge"):  # neither reads it to any effect
        assert {layer.shell.rule.renormalise for layer in moe_layers(model)} == {norm}
    plain = run(model)
    choices = moe_layers(model)[0].router.num_experts
    allowed = torch.ones(choices, dtype=torch.bool)
    allowed[gone] = False
    with record_routing(model) as record, override_routing(model, lambda call: call.choose(allowed_TE=allowed)):
        logits = run(model)
    for call in record.calls:
        assert not call.routing.load_E[gone].any()
        assert not call.routing.probs_TE[:, gone].any()
        assert torch.isfinite(call.routing.entropy)
    drop_experts(model, gone)
    assert (logits - plain).abs().max() > 1e-3  # the experts did matter
    # Several families form their scores in float32 whatever the model's dtype: relative to the largest logit.
    assert (run(model) - logits).abs().max() < 1e-6 * logits.abs().max()


@pytest.mark.parametrize("name", ["qwen3_moe_raw", "olmoe", "qwen3_moe", "mixtral"])
@torch.no_grad()
def test_keeping_the_scores_is_asked_for_by_name(name: str) -> None:
    """Where a family does not renormalise an allowed expert keeps its weight; where it does, weights sum to 1."""
    model, gone = roomy(name)
    allowed = torch.ones(EXPERTS, dtype=torch.bool)
    allowed[gone] = False
    renormalises = moe_layers(model)[0].shell.rule.renormalise

    def check(call: Any) -> Routing:
        kept, dropped = (call.choose(allowed_TE=allowed, keep_scores=keep) for keep in (True, False))
        everyone = call.choose(ids_TK=torch.arange(EXPERTS).expand(call.routing.num_rows, -1)).weights_TE
        assert not kept.load_E[gone].any()
        if renormalises:
            torch.testing.assert_close(kept.weights_TK.sum(1), torch.ones_like(kept.weights_TK[:, 0]))
            torch.testing.assert_close(kept.weights_TE, dropped.weights_TE)
        else:
            torch.testing.assert_close(kept.weights_TE, everyone * kept.mask_TE)
            assert bool((dropped.weights_TE[dropped.mask_TE] > everyone[dropped.mask_TE]).all())
        with pytest.raises(ValueError, match="keep_scores=True needs allowed_TE"):
            call.choose(ids_TK=call.routing.expert_ids_TK, keep_scores=True)
        return call.routing

    with override_routing(model, check):
        run(model)


@pytest.mark.parametrize("name", [name for name in CHOOSING if FAMILIES[name].form == "stacked"])
@torch.no_grad()
def test_an_emptied_slot_rescales_no_other(name: str) -> None:
    """What an override empties by itself is used as it stands; ``choose`` follows the family's own rule."""
    model, _ = roomy(name)
    layer = moe_layers(model)[0]
    rule = layer.shell.rule
    seen: list[Tensor] = []
    hook = layer.experts.module.register_forward_pre_hook(lambda module, args: seen.append(args[2].flatten(0, -2)))

    def empty_first(call: Any) -> Routing:
        ids_TK = call.routing.expert_ids_TK.clone()
        ids_TK[:, 0] = call.routing.num_experts
        weights_TK = call.routing.weights_TK.clone()
        weights_TK[:, 0] = 0
        ruled = call.choose(ids_TK=ids_TK).weights_TK[:, 1:]
        left = weights_TK[:, 1:]
        if name in OWN_RULES:
            pass
        elif rule.renormalise:
            torch.testing.assert_close(ruled / ruled.sum(1, keepdim=True), left / left.sum(1, keepdim=True))
            if rule.expert_scale is None:  # else sums say nothing
                torch.testing.assert_close(ruled.sum(1), call.routing.weights_TK.sum(1))
        else:
            torch.testing.assert_close(ruled, left)
        return call.routing.replace(expert_ids_TK=ids_TK, weights_TK=weights_TK)

    run(model)
    with override_routing(model, empty_first, layers=[layer]):
        run(model)
    hook.remove()
    plain, emptied = seen
    assert not emptied[:, 0].any()
    torch.testing.assert_close(emptied[:, 1:], plain[:, 1:], rtol=1e-7, atol=0)


@torch.no_grad()
def test_a_row_in_which_nothing_is_allowed_is_empty_and_finite() -> None:
    model, _ = roomy("qwen3_moe_raw")
    allowed_TE = torch.ones(18, EXPERTS, dtype=torch.bool)
    allowed_TE[4] = False
    with record_routing(model) as record, override_routing(model, lambda call: call.choose(allowed_TE=allowed_TE)):
        assert torch.isfinite(run(model)).all()
    assert all(call.routing.active_T.tolist() == [3] * 4 + [0] + [3] * 13 for call in record.calls)
    assert all(torch.isfinite(call.routing.entropy) for call in record.calls)


@torch.no_grad()
def test_another_router_on_the_logits_respects_what_an_inner_override_took_away() -> None:
    model, gone = roomy("qwen3_moe_raw")
    allowed = torch.ones(EXPERTS, dtype=torch.bool)
    allowed[gone] = False
    with (
        record_routing(model) as record,
        swap_routing(model, TopPRouter, p=0.9),
        override_routing(model, lambda call: call.choose(allowed_TE=allowed)),
    ):
        run(model)
    assert all(not call.routing.load_E[gone].any() for call in record.calls)


# Routers of ours -----------------------------------------------------------------------------------------------------
D, E, GONE = 8, 6, [1, 4]
PAIR = {"experts_per_token": 2.0, "grouping": "batch", "allow_future": True}
OWN: dict[str, tuple[type[Router], dict[str, Any]]] = {
    "softmax": (TopKRouter, {"top_k": 3, "renormalize": False}),
    "softmax_renormalised": (TopKRouter, {"top_k": 3, "renormalize": True, "bias": True}),
    "softmax_biased": (TopKRouter, {"top_k": 3, "renormalize": False, "bias": True, "scale": 1.7}),
    "softmax_groups": (
        TopKRouter,
        {"top_k": 2, "renormalize": False, "bias": True, "num_groups": 2, "top_groups": 1},
    ),
    "sigmoid_groups": (TopKRouter, {"top_k": 2, "score": "sigmoid", "bias": True, "num_groups": 2, "top_groups": 1}),
    "cosine": (CosineRouter, {"top_k": 3, "renormalize": False}),
    "relu": (ReLURouter, {"target": 2}),
    "top_p": (TopPRouter, {"p": 0.7}),
    "top_p_standardised": (TopPRouter, {"p": 0.7, "normalize": True}),
    "expert_choice": (ExpertChoiceRouter, {"experts_per_token": 2.0, "grouping": "batch"}),
    "pair_choice": (PairChoiceRouter, PAIR),
    "pair_choice_all": (PairChoiceRouter, {**PAIR, "normalize": "all"}),
    "pair_choice_rows": (PairChoiceRouter, {**PAIR, "expert_side": "token_softmax", "normalize": "selected"}),
    "pair_choice_causal": (PairChoiceRouter, {"experts_per_token": 2.0, "grouping": "causal"}),
}


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_allowed_equals_dropping_in_routers_of_ours(name: str) -> None:
    torch.manual_seed(0)
    kind, options = OWN[name]
    router = kind(D, E, **options).eval()
    for key, value in (*router.named_parameters(), *router.named_buffers()):
        if key in ("selection_bias_E", "scale_log"):
            value.copy_(torch.randn(value.shape) * 0.3)
    layer = MoE(FFNExperts(D, 5, E), router).double().eval()
    x_TD = torch.randn(16, D, dtype=torch.float64) * 2
    context = Context(token_mask_T=torch.arange(16) != 3)
    allowed = torch.ones(E, dtype=torch.bool)
    allowed[GONE] = False
    plain, _ = layer(x_TD, context)
    with override_routing(layer, lambda call: call.choose(allowed_TE=allowed)):
        y_TO, routing = layer(x_TD, context)
    drop_experts(layer, GONE)
    dropped_TO, dropped = layer(x_TD, context)
    assert (plain - y_TO).abs().max() > 1e-3
    torch.testing.assert_close(routing.weights_TE[:, allowed], dropped.weights_TE, rtol=0, atol=1e-6)
    torch.testing.assert_close(routing.probs_TE[:, allowed], dropped.probs_TE, rtol=0, atol=1e-6)
    assert torch.equal(routing.load_E[allowed], dropped.load_E)
    torch.testing.assert_close(y_TO, dropped_TO, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_gradients_of_a_restricted_choice_are_finite(name: str) -> None:
    torch.manual_seed(0)
    kind, options = OWN[name]
    layer = MoE(FFNExperts(D, 5, E), kind(D, E, **options))
    allowed = torch.arange(E) != 1
    x_TD = torch.randn(16, D, requires_grad=True)
    with override_routing(layer, lambda call: call.choose(allowed_TE=allowed)):
        y_TO, routing = layer(x_TD)
    (y_TO.square().sum() + routing.probs_TE.square().sum() + routing.entropy).backward()
    assert x_TD.grad is not None and torch.isfinite(x_TD.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.router.parameters() if p.grad is not None)
