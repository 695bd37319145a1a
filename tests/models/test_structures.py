"""What single structures have of their own: identity experts, shared sums, experts of an attention, full experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.models.saving import save
from moesaic.models.surgery import drop_experts, merge_experts
from moesaic.routing import Routing
from tests.models.families import EXPERTS, build, run


@torch.no_grad()
def test_identity_experts_are_experts_without_weights() -> None:
    """LongCat's ids beyond the bank: they count in the load, return their input when forced, follow a drop."""
    model = build("longcat_flash")
    with record_routing(model) as record:
        run(model)
    load = sum(call.routing.load_E for call in record.calls)
    assert load.shape == (EXPERTS + 4,) and load[EXPERTS:].sum() > 0
    layer = moe_layers(model)[0]
    x_TD = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[EXPERTS + 1, EXPERTS + 3]] * 5)
    two = Routing(ids, torch.tensor([[0.25, 0.5]] * 5), EXPERTS + 4)
    assert torch.allclose(layer.experts(x_TD, two), 0.75 * x_TD)
    seen = {}
    handle = layer.module.register_forward_hook(lambda m, args, out: seen.update(x=args[0], y=out))
    with override_routing(model, lambda call: two.take(torch.zeros(18, dtype=torch.int64)), layers=[0]):
        run(model)
    handle.remove()
    assert torch.allclose(seen["y"], 0.75 * seen["x"], atol=1e-6)


@torch.no_grad()
def test_shared_experts_share_the_sum_of_another_choice() -> None:
    """Inkling weighs chosen and shared experts together: a heavier choice leaves the shared ones less."""
    model = build("inkling")
    for layer in moe_layers(model):
        layer.shell.router.global_scale.fill_(1.3)  # learned: read where it lives
    totals, gammas = [], []
    handles = [
        layer.shell.experts.module.register_forward_pre_hook(lambda m, args: totals.append(args[2].sum(1)))
        for layer in moe_layers(model)
    ]
    handles += [
        layer.module.shared_experts.register_forward_pre_hook(
            lambda m, args, kwargs: gammas.append(kwargs["gammas"]), with_kwargs=True
        )
        for layer in moe_layers(model)
    ]
    with override_routing(model, lambda call: call.choose(ids_TK=call.routing.expert_ids_TK[:, :1])):
        run(model)
    for total, gamma in zip(totals, gammas, strict=True):
        assert torch.allclose(total + gamma.reshape(18, 2).sum(1), torch.full((18,), 8.0 * 1.3), rtol=1e-5)
    for handle in handles:
        handle.remove()
    layer = moe_layers(model)[0]
    with pytest.raises(ValueError, match=r"8 \+ 2 are needed: use call.choose"):
        layer.rule.weigh(torch.zeros(1, EXPERTS), torch.zeros(1, 2, dtype=torch.int64))


@torch.no_grad()
def test_experts_of_an_attention() -> None:
    """JetMoE routes queries and outputs too: fewer experts in a row are fine, more than its heads allow are not."""
    model = build("jetmoe")
    layer = moe_layers(model)[1]
    assert layer.name.endswith("self_attention.experts") and not layer.experts.has_gate
    with record_routing(model, layers=[1]) as record, override_routing(model, one_of_three, layers=[1]):
        fewer = run(model)
    assert torch.isfinite(fewer).all() and not torch.equal(fewer, run(model))
    assert all((call.routing.active_T == 1).all() for call in record.calls)
    four = torch.arange(4).expand(18, 4)
    with (
        override_routing(model, lambda call: call.choose(ids_TK=four), layers=[1]),
        pytest.raises(ValueError, match="a row uses 4 experts; experts of an attention take at most 3"),
    ):
        run(model)
    with pytest.raises(ValueError, match="cannot be run outside it"):
        layer.experts(torch.zeros(1, 32), Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), EXPERTS))


def one_of_three(call):
    return call.choose(ids_TK=call.routing.expert_ids_TK[:, :1])


@torch.no_grad()
def test_a_bank_that_runs_two_experts_whatever_the_router_says() -> None:
    """NLLB-MoE as released: kept choices are computed by experts 1 and 0, forced ones by those that they name."""
    model = build("nllb_moe")
    plain = run(model)
    broken = copy.deepcopy(model)
    for layer in moe_layers(broken):
        for expert in range(2, EXPERTS):
            layer.experts.write(expert, {"down": torch.zeros(32, 24), "down_bias": torch.zeros(32)})
    assert torch.allclose(run(broken), plain, atol=1e-5)
    with override_routing(broken, lambda call: call.choose(ids_TK=call.routing.expert_ids_TK)):
        assert torch.allclose(run(broken), plain, atol=1e-5)
    two = torch.tensor([[4, 5]]).expand(18, 2)
    with (
        record_routing(broken, outputs=True) as record,
        override_routing(broken, lambda call: call.choose(ids_TK=two)),
    ):
        run(broken)
    kept = [(call.routing.expert_ids_TK == call.routing.extras["own_choice"]).all(1) for call in record.calls]
    for call, own in zip(record.calls, kept, strict=True):
        assert (call.y[~own] == 0).all()


@torch.no_grad()
def test_a_full_expert_leaves_a_slot_empty() -> None:
    """Switch: the fourth token of a sequence that wants an expert of capacity 3 gets none, also in another choice."""
    model = build("switch_transformers")
    with record_routing(model) as record:
        run(model)
    assert any((call.routing.active_T == 0).any() for call in record.calls)
    for call in record.calls:
        for sequence in call.routing.expert_ids_TK.view(2, 9):
            assert torch.bincount(sequence[sequence < EXPERTS], minlength=EXPERTS).max() <= 3
    pair = torch.arange(EXPERTS) < 2
    with (
        record_routing(model) as record,
        override_routing(model, lambda call: call.choose(allowed_TE=pair)),
    ):
        run(model)
    assert all((call.routing.active_T.view(2, 9).sum(1) <= 6).all() for call in record.calls)
    assert all((call.routing.load_E[2:] == 0).all() for call in record.calls)


@torch.no_grad()
def test_identity_experts_can_go_too(tmp_path: Path) -> None:
    """LongCat's experts without weights have ids behind the others: dropped, they are gone from router and counts."""
    model = build("longcat_flash")
    gone = torch.tensor([2, 9, 11])
    allowed = torch.ones(EXPERTS + 4, dtype=torch.bool).index_fill(0, gone, False)

    def masked(call: Any) -> Routing:
        shell, logits_TE = call.layer.shell, call.routing.logits_TE.masked_fill(~allowed, -torch.inf)
        ids_TK = shell.choose(logits_TE, allowed.expand_as(logits_TE), call.routing.slots)
        return call.routing.replace(expert_ids_TK=ids_TK, weights_TK=shell.weigh(logits_TE, ids_TK))

    with override_routing(model, masked):
        expected = run(model)
    with pytest.raises(ValueError, match="as many of them in every layer"):
        drop_experts(model, {0: [9]})
    with pytest.raises(ValueError, match=r"experts are 0\.\.11"):
        drop_experts(model, [12])
    drop_experts(model, gone.tolist())
    assert [(x.num_experts, x.router.num_experts) for x in moe_layers(model)] == [(EXPERTS - 1, EXPERTS + 1)] * 2
    assert (run(model) - expected).abs().max() < 1e-5
    save(model, tmp_path / "cut")
    opened = type(model).from_pretrained(tmp_path / "cut").eval()
    assert opened.config.zero_expert_num == 2
    assert (run(opened) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_merging_in_other_layouts() -> None:
    for name in ("dbrx", "llama4", "switch_transformers", "nllb_moe", "jetmoe"):
        model = build(name)
        before = {key: value.clone() for key, value in moe_layers(model)[1].experts.weights().items()}
        merge_experts(model, {1: [[2, 5]]})
        bank = moe_layers(model)[1].experts
        assert bank.num_experts == EXPERTS - 1
        for key, value in bank.weights().items():
            assert torch.allclose(value[2], (before[key][2] + before[key][5]) / 2, atol=1e-6)
            assert torch.equal(value[[0, 1, 3, 4, 5, 6]], before[key][[0, 1, 3, 4, 6, 7]])
        assert torch.isfinite(run(model)).all()
