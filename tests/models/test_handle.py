"""Handles: layers, rules and weights of every family of the standard shell, and of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn

from moesaic.experts.ffn import FFNExperts
from moesaic.layers import MoE
from moesaic.models.handle import moe_layers, select_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.routing import Routing
from moesaic.routing.top_k import TopKRouter
from tests.models.families import EXPERTS, FAMILIES, build, run
from tests.models.forms import watch


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, nn.Module]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param, build(request.param)
    torch.set_num_threads(threads)


def test_layers_experts_and_rule_are_found(family: tuple[str, nn.Module]) -> None:
    name, model = family
    spec = FAMILIES[name]
    layers = moe_layers(model)
    assert [layer.index for layer in layers] == list(range(spec.layers))
    for layer in layers:
        assert model.get_submodule(layer.name) is layer.module
        assert layer.num_experts == spec.experts
        assert layer.top_k == spec.top_k
        assert layer.router.num_experts == spec.choices
        assert layer.rule.weigh is not None and layer.rule.reason == ""


@torch.no_grad()
@pytest.mark.case("C15")
def test_recording_and_identity_change_nothing(family: tuple[str, nn.Module]) -> None:
    name, model = family
    plain = run(model)
    seen: list[torch.Tensor] = []
    handles = [handle for layer in moe_layers(model) for handle in watch(FAMILIES[name], layer, seen)]
    with record_routing(model, hidden=True, outputs=True) as record:
        assert torch.equal(run(model), plain)
    for handle in handles:
        handle.remove()
    assert len(record.calls) == FAMILIES[name].layers == len(seen)
    for call, weights_TE in zip(record.calls, seen, strict=True):
        routing = call.routing
        assert routing.score_function == FAMILIES[name].score
        assert torch.equal(routing.mask_TE, weights_TE != 0)
        factor = call.layer.shell.block_factor  # a factor that the block applies is part of the weights
        assert torch.allclose(routing.weights_TE, weights_TE * factor, rtol=1e-6, atol=0.0)
        assert call.x.shape == (18, 32)
        assert call.y.shape == (18, 32)
        assert call.context.position_T.tolist() == [*range(9), *range(9)]
    with override_routing(model, lambda call: call.routing, output=lambda call, y: y):
        assert torch.equal(run(model), plain)


@torch.no_grad()
@pytest.mark.case("C08")
def test_scores_are_logits(family: tuple[str, nn.Module]) -> None:
    """The chosen experts' weights follow from softmax or sigmoid of the recorded logits: no probabilities."""
    name, model = family
    with record_routing(model) as record:
        run(model)
    for call in record.calls:
        logits = call.routing.logits_TE
        assert not torch.allclose(logits.sum(-1), torch.ones(len(logits)), atol=1e-3)
        if name == "phimoe":  # two softmaxes: the second ratio differs from the first
            continue
        probs = logits.softmax(-1) if FAMILIES[name].score == "softmax" else logits.sigmoid()
        filled = call.routing.filled_TK
        chosen = probs.gather(1, call.routing.expert_ids_TK.clamp(max=probs.shape[1] - 1))
        scale = None
        if "per_expert_scale" in call.layer.rule.description:
            scale = call.layer.shell.router.per_expert_scale[call.routing.expert_ids_TK]
        weights = call.routing.weights_TK if scale is None else call.routing.weights_TK / scale
        ratio = weights / chosen
        largest = ratio.masked_fill(~filled, 0.0).amax(1, keepdim=True)
        assert torch.allclose(ratio[filled], largest.expand_as(ratio)[filled], rtol=1e-4)


@torch.no_grad()
def test_forced_routing_is_obeyed(family: tuple[str, nn.Module]) -> None:
    """The routed part equals a dense sum over experts run one at a time, with the forced weights."""
    name, model = family
    choices = FAMILIES[name].choices
    if FAMILIES[name].form != "stacked":
        _last_layer_obeys(name, model)
        return
    weights_TE = torch.rand(18, choices, generator=torch.Generator().manual_seed(3)).clamp(min=0.5) - 0.5
    weights_TE[:, EXPERTS:] = 0.0  # the bank itself may or may not see experts that return their input
    forced = Routing.from_dense(weights_TE)
    sites, captured = {}, {}
    for layer in moe_layers(model):
        bank = layer.experts.module
        sites[layer.name] = layer
        captured[layer.name] = []
        bank.register_forward_hook(lambda m, a, out, key=layer.name: captured[key].append((a[0].clone(), out.clone())))
    try:
        with override_routing(model, lambda call: forced):
            run(model)
        for name, layer in sites.items():
            x_TD, got = captured[name][0]
            dense = torch.zeros_like(got)
            for expert in range(EXPERTS):
                out = layer.experts(x_TD, Routing(torch.full((18, 1), expert), torch.ones(18, 1), EXPERTS))
                dense += forced.weights_TE[:, expert, None] / layer.shell.block_factor * out
            assert torch.allclose(got, dense, atol=2e-5, rtol=1e-4)
    finally:
        for layer in sites.values():
            layer.experts.module._forward_hooks.clear()


def _last_layer_obeys(name: str, model: nn.Module) -> None:
    """What the block adds for a forced routing, beside what it gives for none, is the sum over the experts named."""
    last, choices = FAMILIES[name].alone, FAMILIES[name].choices
    weights = torch.rand(18, choices, generator=torch.Generator().manual_seed(3)).clamp(min=0.5) - 0.5
    forced, none = Routing.from_dense(weights), Routing.from_dense(torch.zeros_like(weights))
    outputs = []
    for routing in (forced, none):
        with (
            record_routing(model, hidden=True, outputs=True, layers=[last]) as record,
            override_routing(model, lambda call, r=routing: r, layers=[last]),
        ):
            run(model)
        outputs.append(record.calls[0])
    layer, x_TD = outputs[0].layer, outputs[0].x
    want = torch.zeros_like(x_TD)
    for expert in range(choices):
        column = weights[:, expert : expert + 1]
        ids = torch.full((18, 1), expert).masked_fill(column == 0, choices)
        want += layer.experts(x_TD, Routing(ids, column, choices))
    assert torch.allclose(outputs[0].y - outputs[1].y, want, atol=2e-5, rtol=1e-4)
    with pytest.raises(IndexError, match="experts 0"):
        layer.experts.weights([choices])


@torch.no_grad()
@pytest.mark.case("C13")
def test_empty_slots_touch_no_expert(family: tuple[str, nn.Module]) -> None:
    """More empty slots change nothing, and an expert that only empty slots could reach may hold NaN."""
    name, model = family
    plain, choices = run(model), FAMILIES[name].choices

    def widen(call):
        ids, weights = call.routing.expert_ids_TK, call.routing.weights_TK
        more = torch.full_like(ids, choices)
        return call.routing.replace(
            expert_ids_TK=torch.cat([more, ids, more], 1),
            weights_TK=torch.cat([torch.zeros_like(weights), weights, torch.zeros_like(weights)], 1),
        )

    with override_routing(model, widen):
        assert torch.allclose(run(model), plain, atol=1e-5)

    if FAMILIES[name].form == "dense scores":
        return  # its kernel runs every expert on every row
    broken = copy.deepcopy(model)
    for layer in moe_layers(broken):
        # Not an even one: longcat_flash itself runs these, with weight 0, for choices of identity experts. Nor 1, which
        # nllb_moe runs for every first choice.
        layer.experts.write(3, {"down": torch.full_like(layer.experts.weights([3])["down"][0], torch.nan)})

    def without_broken(call):
        ids = call.routing.expert_ids_TK
        drop = ids == 3
        return call.routing.replace(
            expert_ids_TK=ids.masked_fill(drop, choices), weights_TK=call.routing.weights_TK.masked_fill(drop, 0.0)
        )

    with record_routing(broken) as record, override_routing(broken, without_broken):
        assert torch.isfinite(run(broken)).all()
    assert all(not (call.routing.expert_ids_TK == 3).any() for call in record.calls)


@torch.no_grad()
def test_an_exception_restores_everything(family: tuple[str, nn.Module]) -> None:
    _, model = family
    plain = run(model)

    def fail(call):
        raise ZeroDivisionError

    for kind in ({"route": fail}, {"route": None, "output": lambda call, y: fail(call)}):
        with pytest.raises(ZeroDivisionError), override_routing(model, **kind):
            run(model)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert torch.equal(run(model), plain)


@torch.no_grad()
@pytest.mark.case("C12")
def test_choose_gives_the_models_own_weights(family: tuple[str, nn.Module]) -> None:
    name, model = family
    plain = run(model)
    choices = FAMILIES[name].choices
    everyone = torch.ones(choices, dtype=torch.bool)
    odd = torch.arange(choices) % 2 == 1

    def check(call):
        same = call.choose(ids_TK=call.routing.expert_ids_TK)
        assert torch.allclose(same.weights_TK, call.routing.weights_TK, atol=1e-6, rtol=1e-5)
        own = call.choose(allowed_TE=everyone)
        assert torch.equal(own.expert_ids_TK, call.routing.expert_ids_TK)  # slot order too
        some = call.choose(allowed_TE=odd)
        assert bool((some.expert_ids_TK[some.filled_TK] % 2 == 1).all())
        assert bool((some.active_T >= 1).all()) or FAMILIES[name].form == "one-hot slots"  # there experts can be full
        fewer = call.choose(ids_TK=call.routing.expert_ids_TK.clone().index_fill_(1, torch.tensor([0]), choices))
        assert bool((fewer.weights_TK[:, 0] == 0).all())
        return same

    with override_routing(model, check):
        assert torch.allclose(run(model), plain, atol=1e-4)


@torch.no_grad()
@pytest.mark.case("C15")
def test_a_forced_choice_changes_those_rows_alone(family: tuple[str, nn.Module]) -> None:
    """In the last MoE layer: rows that are given other experts change there, and no other row."""
    name, model = family
    last, choices = FAMILIES[name].layers - 1, FAMILIES[name].choices
    rows = torch.tensor([2, 7, 11])

    def force(call):
        own = call.routing.expert_ids_TK
        others = torch.stack([(own[:, 0] + 1 + slot) % choices for slot in range(own.shape[1])], 1)
        ids = own.clone()
        ids[rows] = others[rows]
        chosen = call.choose(ids_TK=ids)
        keep = torch.ones(len(ids), 1, dtype=torch.bool)
        keep[rows] = False
        return chosen.replace(weights_TK=torch.where(keep, call.routing.weights_TK, chosen.weights_TK))

    with record_routing(model, outputs=True, layers=[last]) as plain:
        run(model)
    with record_routing(model, outputs=True, layers=[last]) as forced, override_routing(model, force, layers=[last]):
        run(model)
    before, after = plain.calls[0], forced.calls[0]
    different = (before.y - after.y).abs().amax(1) > 1e-5
    assert different.nonzero().flatten().tolist() == rows.tolist()
    moved = (before.routing.expert_ids_TK != after.routing.expert_ids_TK).any(1)
    assert moved.nonzero().flatten().tolist() == rows.tolist()


@torch.no_grad()
def test_weights_read_in_one_convention(family: tuple[str, nn.Module]) -> None:
    """Gate, up and down of one expert, whatever the layout: written over another, that one computes the same."""
    name, model = family
    layer = moe_layers(copy.deepcopy(model))[FAMILIES[name].alone]
    bank = layer.experts
    read = bank.weights([2, 5])
    assert ("gate" in read) == bank.has_gate
    assert all(read[key].shape == (2, bank.width, bank.dim) for key in ("gate", "up") if key in read)
    assert read["down"].shape == (2, bank.out_dim, bank.width)
    x_TD = torch.randn(4, bank.dim, generator=torch.Generator().manual_seed(0))

    def of(expert: int) -> torch.Tensor:
        y_TO: torch.Tensor = bank(x_TD, Routing(torch.full((4, 1), expert), torch.ones(4, 1), bank.num_experts))
        return y_TO

    bank.write(5, {key: value[0] for key, value in read.items()})
    assert torch.equal(of(5), of(2))
    # The first hidden unit's gate, up and down all belong together: without its down row the output misses that unit.
    silent = {key: value[0].clone() for key, value in read.items()}
    silent["down"][:, 1:] = 0
    inward = "gate" if bank.has_gate else "up"
    silent[inward][1:] = torch.randn_like(silent[inward][1:])
    bank.write(5, silent)
    only_first = of(5)
    assert bool((only_first != 0).any())
    silent[inward][1:] = 0
    bank.write(5, silent)
    assert torch.allclose(of(5), only_first, atol=1e-6)
    with pytest.raises(IndexError, match=r"experts 0\.\."):
        bank.weights([bank.num_experts])
    with pytest.raises(ValueError, match="shape"):
        bank.write(0, {"up": read["up"][0][1:]})


def test_a_dense_model_is_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no MoE layer: searched \d+ modules"):
        moe_layers(transformers.LlamaForCausalLM(config))


class LoneRouter(nn.Linear):
    """Logits alone, where the bank beside it takes no choice that is known."""


class Unknown(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = LoneRouter(8, 4), experts


def test_an_unknown_structure_is_named() -> None:
    bank = nn.Module()
    bank.gate_up_proj, bank.down_proj = nn.Parameter(torch.zeros(4, 12, 8)), nn.Parameter(torch.zeros(4, 8, 6))
    with pytest.raises(ValueError, match=r"layers\.0 \(Unknown\): .*returns 1 values"):
        moe_layers(nn.ModuleDict({"layers": nn.ModuleList([Unknown(bank)])}))
    listed = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    with pytest.raises(ValueError, match=r"layers\.0\.(router|experts).* looks like a part of an MoE layer"):
        moe_layers(nn.ModuleDict({"layers": nn.ModuleList([Unknown(listed)])}))


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = MoE(FFNExperts(16, 8, 4), TopKRouter(16, 4, 2))
        self.second = MoE(FFNExperts(16, 8, 6), TopKRouter(16, 6, 3))

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_layers_of_ours_have_the_same_handle() -> None:
    model = Ours()
    layers = moe_layers(model)
    assert [(layer.name, layer.num_experts, layer.top_k) for layer in layers] == [("first", 4, 2), ("second", 6, 3)]
    assert layers[0].router is model.first.router
    assert layers[0].experts is model.first.experts
    with record_routing(model) as record:
        model(torch.randn(5, 16))
    for call in record.calls:
        weights = call.layer.rule.weigh(call.routing.logits_TE, call.routing.expert_ids_TK)
        assert torch.equal(weights, call.routing.weights_TK)


def test_selecting_layers() -> None:
    model = Ours()
    assert [layer.name for layer in select_layers(model, [-1])] == ["second"]
    assert [layer.name for layer in select_layers(model, ["second", 0])] == ["first", "second"]
    for wrong in ([2], ["third"], []):
        with pytest.raises(ValueError, match="layers"):
            select_layers(model, wrong)
