"""Overrides: nesting, padding, gradients, recomputation, layers of ours and of others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.experts.ffn import FFNExperts
from moesaic.layers import MoE
from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.routing import Context, Routing
from moesaic.routing.top_k import TopKRouter
from tests.models.families import EXPERTS, FAMILIES, VOCABULARY, build, run, token_ids


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    return build("qwen3_moe")


@pytest.fixture(scope="module")
def deepseek() -> nn.Module:
    return build("deepseek_v3")


def only(expert: int):
    def route(call):
        return call.choose(ids_TK=torch.full((call.routing.num_rows, 1), expert))

    return route


@torch.no_grad()
def test_inner_acts_first(qwen: nn.Module) -> None:
    seen = []

    def outer(call):
        seen.append(call.routing)
        return only(5)(call)

    with override_routing(qwen, outer), override_routing(qwen, only(2)):
        both = run(qwen)
    assert all((routing.expert_ids_TK == 2).all() for routing in seen)
    with override_routing(qwen, only(5)):
        assert torch.equal(run(qwen), both)


@torch.no_grad()
def test_an_outer_intervention_sees_empty_slots(qwen: nn.Module) -> None:
    """Between interventions a routing stays a routing: what kernels need is made once, at the end."""

    def first_only(call):
        ids = call.routing.expert_ids_TK.clone()
        ids[:, 1:] = EXPERTS
        return call.choose(ids_TK=ids)

    with record_routing(qwen) as record, override_routing(qwen, first_only):
        run(qwen)
    assert all((call.routing.active_T == 1).all() for call in record.calls)


@torch.no_grad()
def test_layers_and_outputs(qwen: nn.Module) -> None:
    plain = run(qwen)
    with record_routing(qwen, outputs=True) as record:
        run(qwen)
    last = record.by_layer(2)[0].y
    with override_routing(qwen, None, output=lambda call, y: torch.zeros_like(y), layers=[2]) as layers:
        without = run(qwen)
    assert [layer.index for layer in layers] == [2]
    assert not torch.allclose(without, plain)
    with override_routing(qwen, None, output=lambda call, y: last, layers=["model.layers.2.mlp"]):
        assert torch.equal(run(qwen), plain)
    with (
        override_routing(qwen, None, output=lambda call, y: y[:-1]),
        pytest.raises(ValueError, match="output override"),
    ):
        run(qwen)


@torch.no_grad()
def test_a_wrong_routing_is_refused(qwen: nn.Module) -> None:
    with override_routing(qwen, lambda call: None), pytest.raises(TypeError, match="NoneType"):
        run(qwen)
    with (
        override_routing(qwen, lambda call: call.routing.take(torch.arange(3))),
        pytest.raises(ValueError, match="3 rows"),
    ):
        run(qwen)
    for bad in (-1, EXPERTS + 1):
        with override_routing(qwen, only(bad)), pytest.raises(ValueError, match=r"0\.\.7"):
            run(qwen)
    one = lambda call: call.choose()  # noqa: E731
    with override_routing(qwen, one), pytest.raises(ValueError, match="exactly one"):
        run(qwen)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in qwen.modules())


@torch.no_grad()
@pytest.mark.case("C03")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_stay_the_models_own(deepseek: nn.Module, side: str) -> None:
    ids = token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    if side == "right":
        mask = mask.flip(1)
    plain = run(deepseek, ids, attention_mask=mask)
    contexts = []

    def forced(call):
        contexts.append(call.context)
        assert torch.equal(call.routing.active_T == 0, mask.reshape(-1) == 0)
        return call.choose(ids_TK=call.routing.expert_ids_TK)

    outputs = []
    router = moe_layers(deepseek)[0].shell.router
    with override_routing(deepseek, forced):
        handle = router.register_forward_hook(lambda m, a, out: outputs.append(out))
        again = run(deepseek, ids, attention_mask=mask)
        handle.remove()
    assert torch.allclose(again, plain, atol=1e-5)
    assert all(torch.equal(context.token_mask_T, mask.reshape(-1).bool()) for context in contexts)
    before = router(outputs[0][0].new_zeros(1, 32))  # the router itself is untouched
    assert before[2].shape == (1, 3)
    padded = mask.reshape(-1) == 0
    with record_routing(deepseek) as record:
        run(deepseek, ids, attention_mask=mask)
    own = record.calls[0].routing
    assert bool((outputs[0][1][padded] > 0).all())  # computed with the model's own weights
    assert bool((own.weights_TK[padded] == 0).all())


@torch.no_grad()
@pytest.mark.case("C03")
@pytest.mark.parametrize("name", [name for name, spec in FAMILIES.items() if spec.form != "stacked"] + ["inkling"])
def test_padded_rows_in_other_structures(name: str) -> None:
    """Padding has empty slots in what is seen, and what the model computes for it stays the model's own."""
    model, ids = build(name), token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    plain = run(model, ids, attention_mask=mask)
    seen = []

    def forced(call):
        seen.append(call.routing)
        return call.choose(ids_TK=call.routing.expert_ids_TK)

    with override_routing(model, forced):
        assert torch.allclose(run(model, ids, attention_mask=mask), plain, atol=1e-5)
    padded = [routing for routing in seen if routing.token_mask_T is not None and not routing.token_mask_T.all()]
    assert padded and all((routing.active_T[mask.reshape(-1) == 0] == 0).all() for routing in padded)


@torch.no_grad()
@pytest.mark.case("C15")
def test_the_scale_factor_is_in_the_weights(deepseek: nn.Module) -> None:
    plain = run(deepseek)
    with record_routing(deepseek) as record:
        run(deepseek)
    for call in record.calls:
        assert torch.allclose(call.routing.weights_TK.sum(1), torch.full((18,), 1.7))

    def same(call):
        return call.choose(ids_TK=call.routing.expert_ids_TK)

    with override_routing(deepseek, same):
        assert torch.allclose(run(deepseek), plain, atol=1e-5)


@torch.no_grad()
@pytest.mark.case("C12")
def test_the_selection_bias_chooses_but_does_not_weigh() -> None:
    model = build("deepseek_v3")
    for layer in moe_layers(model):
        layer.shell.router.e_score_correction_bias[4] = 5.0
    seen = []

    def route(call):
        ids = call.choose(allowed_TE=torch.ones(EXPERTS, dtype=torch.bool)).expert_ids_TK
        assert torch.equal(ids, call.routing.expert_ids_TK)
        seen.append(ids)
        return call.routing

    with override_routing(model, route):
        run(model)
    assert all((ids == 4).any(1).all() for ids in seen)
    for layer in moe_layers(model):
        assert "e_score_correction_bias" in layer.rule.description


@pytest.mark.case("C02")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "inkling", "dbrx", "llama4", "doge"])
def test_recomputation_decides_and_counts_the_same(name: str) -> None:
    """With gradient checkpointing: equal gradients under an override that looks at padding, one record per layer."""
    ids = token_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    allowed = torch.arange(FAMILIES[name].choices) != 1

    def route(call):
        real = call.context.token_mask_T
        assert real is not None
        assert call.context.phase == "train"
        return call.choose(allowed_TE=allowed[None] | (torch.arange(len(real))[:, None] % 2 == 0))

    def gradients(checkpointing: bool) -> tuple[list[torch.Tensor], int]:
        model = build(name).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        with record_routing(model, hidden=True) as record, override_routing(model, route):
            loss = run(model, ids, attention_mask=mask).square().mean()
            loss = loss + sum(call.routing.probs_TE.square().sum() for call in record.calls)
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], len(record.calls)

    plain, calls = gradients(False)
    again, calls_again = gradients(True)
    assert calls == calls_again == FAMILIES[name].layers
    assert len(plain) == len(again)
    for a, b in zip(plain, again, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)


def test_gradient_reaches_the_router_through_an_override(qwen: nn.Module) -> None:
    qwen.zero_grad()
    with override_routing(qwen, lambda call: call.choose(ids_TK=call.routing.expert_ids_TK[:, :2])):
        run(qwen).square().mean().backward()
    for layer in moe_layers(qwen):
        assert layer.shell.router.weight.grad.abs().sum() > 0
    qwen.zero_grad()


class Foreign(nn.Module):
    """A layer of ours inside a model that wants a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = build("mixtral", num_hidden_layers=1, vocab_size=VOCABULARY).model
        self.extra = MoE(FFNExperts(32, 8, 4), TopKRouter(32, 4, 2))

    def forward(self, input_ids, attention_mask=None):
        h = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        context = Context.from_mask(attention_mask, *input_ids.shape)
        return h + self.extra(h, context)[0]


@torch.no_grad()
def test_layers_of_ours_and_others_in_one_model() -> None:
    model = Foreign()
    plain = model(token_ids())
    assert [layer.num_experts for layer in moe_layers(model)] == [8, 4]
    with record_routing(model, outputs=True) as record:
        assert torch.equal(model(token_ids()), plain)
    assert [call.layer.name for call in record.calls] == ["inner.layers.0.mlp", "extra"]
    with override_routing(model, only(3)), override_routing(model, lambda call: call.routing):
        changed = model(token_ids())
    assert not torch.allclose(changed, plain)
    none = lambda call: Routing.from_dense(torch.zeros(18, call.routing.num_experts))  # noqa: E731
    with record_routing(model, outputs=True) as record, override_routing(model, none):
        model(token_ids())
    assert all((call.y == 0).all() for call in record.calls)


@torch.no_grad()
@pytest.mark.case("C01")
def test_bf16_routers_are_reported_as_they_chose() -> None:
    model = build("qwen3_moe").bfloat16()
    outputs = []
    handle = moe_layers(model)[0].shell.router.register_forward_hook(lambda m, a, out: outputs.append(out))
    with record_routing(model) as record:
        plain = run(model)
    handle.remove()
    routing = record.by_layer(0)[0].routing
    assert routing.weights_TK.dtype == torch.bfloat16
    assert torch.equal(routing.expert_ids_TK, outputs[0][2])
    with override_routing(model, lambda call: call.choose(ids_TK=call.routing.expert_ids_TK)):
        assert torch.equal(run(model), plain)
