"""Our routers and banks as layers of transformers' models: equal to what was there, trained, seen, saved, refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from moesaic.data.packing import Batch
from moesaic.experts import FFNExperts, LatentExperts
from moesaic.layers import BareMoE, MoE, collect_routings
from moesaic.losses import BalanceLoss
from moesaic.models import moe_layers, override_routing, record_routing, replace_layers, trained_experts
from moesaic.models.handle import MoELayer
from moesaic.routing import PrincipalSubspaceRouter, TopKRouter, end_step
from moesaic.training.causal_lm import causal_lm_loss
from tests.models.families import build, run, token_ids
from tests.models.small import small_model


def as_it_was(layer: MoELayer) -> MoE:
    """The same computation by parts of ours."""
    bank = trained_experts(layer)
    assert layer.top_k is not None
    renormalize = bool(getattr(layer.router.module, "norm_topk_prob", True))  # Mixtral always does
    router = TopKRouter(bank.dim, bank.num_experts, layer.top_k, renormalize=renormalize)
    router.weight_ED.data.copy_(layer.router.module.weight)
    return MoE(bank, router, losses=[BalanceLoss(0.1)])


def with_star(layer: MoELayer) -> MoE:
    bank = trained_experts(layer)
    router = PrincipalSubspaceRouter(bank.dim, bank.num_experts, 2, basis_lr=0.05)
    return MoE(bank, router, losses=[BalanceLoss(0.1)])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_the_same_parts_compute_the_same_and_so_do_their_gradients(name: str) -> None:
    model, twin = build(name).double(), build(name).double()
    made = replace_layers(twin, as_it_was)
    assert [layer.module for layer in moe_layers(twin)] == made
    assert [layer.name.removesuffix(".moe") for layer in moe_layers(twin)] == [l.name for l in moe_layers(model)]
    ids = token_ids()
    ours, theirs = twin(ids).logits, model(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)  # our routing is float32 whatever the dtype
    ours.square().mean().backward()
    theirs.square().mean().backward()
    mine, original = made[0], moe_layers(model)[0]
    assert mine.router is not None
    torch.testing.assert_close(
        mine.router.weight_ED.grad,
        original.router.module.weight.grad.to(mine.router.weight_ED.dtype),
        atol=1e-6,
        rtol=1e-3,
    )
    assert mine.experts.up_EFD.grad.abs().max() > 0


def test_some_layers_only_and_the_handles_see_both_kinds() -> None:
    model = build("qwen3_moe")
    names = [layer.name for layer in moe_layers(model)]
    replace_layers(model, with_star, layers=[-1])
    assert [layer.name for layer in moe_layers(model)] == [*names[:-1], f"{names[-1]}.moe"]
    seen = []
    with (
        record_routing(model) as record,
        override_routing(model, lambda call: seen.append(call.layer.name) or call.routing),
    ):
        run(model)
    assert seen == [call.layer.name for call in record.calls] == [*names[:-1], f"{names[-1]}.moe"]


def test_it_trains_with_its_losses_and_its_bases_move() -> None:
    model = build("qwen3_moe").train()
    made = replace_layers(model, with_star)
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    loss = causal_lm_loss(model, Batch(ids[:, :-1], ids[:, 1:], mask[:, :-1], ids[:, 1:].numel()))
    assert loss.aux is not None and float(loss.aux) > 0
    assert len(loss.routings) == len(made)
    assert int(loss.routings[0].real_T.sum()) == int(mask[:, :-1].sum())  # padding is told to the layers
    before = [moe.router.subspace.basis_KD.clone() for moe in made]
    (loss.total + loss.aux).backward()
    assert all(moe.router.weight_ED.grad.abs().max() > 0 for moe in made)
    end_step(model)
    assert all(not torch.equal(moe.router.subspace.basis_KD, b) for moe, b in zip(made, before, strict=True))


def test_the_state_dict_is_the_checkpoint(tmp_path) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(build("qwen3_moe"))
        replace_layers(models[-1], with_star)
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(0.01)
    save_model(models[0], str(tmp_path / "model.safetensors"))
    assert load_model(models[1], str(tmp_path / "model.safetensors")) == (set(), [])
    first, second = (run(model.eval()) for model in models)
    assert torch.equal(first, second)


def test_another_bank_in_bf16() -> None:
    model = build("mixtral").bfloat16()

    def latent(layer: MoELayer) -> MoE:
        bank = LatentExperts(layer.experts.weights()["down"].shape[1], 8, 4, compression=2)
        return MoE(bank, TopKRouter(bank.dim, 4, 2))

    made = replace_layers(model, latent)
    assert made[0].experts.down_ZD.dtype == torch.bfloat16
    assert made[0].router.weight_ED.dtype == torch.float32
    with collect_routings() as collected:
        assert torch.isfinite(run(model)).all()
    assert {routing.num_experts for routing in collected.routings} == {4}


def test_a_shared_expert_is_kept_by_hand() -> None:
    model, ids = build("deepseek_v3"), token_ids()
    names = [layer.name for layer in moe_layers(model)]
    shared = model.get_submodule(names[0]).shared_experts

    def make(layer: MoELayer) -> MoE:
        bank = trained_experts(layer)
        return MoE(bank, TopKRouter(bank.dim, bank.num_experts, 2), shared=layer.module.shared_experts)

    made = replace_layers(model, make)
    assert made[0].shared is shared
    assert torch.isfinite(model(ids).logits).all()


def _block(model: nn.Module) -> nn.Module:
    return model.get_submodule(moe_layers(model)[0].name)


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        (
            "deepseek_v3",
            with_star,
            "holds more than router and experts .*shared_experts.*: give the new layer a shared",
        ),
        ("gpt_oss", with_star, "no gated SiLU experts|returns tuple"),
        ("qwen3_moe", lambda layer: nn.Linear(2, 2), "must return a moesaic.MoE"),
        ("qwen3_moe", lambda layer: MoE(FFNExperts(16, 4, 4), TopKRouter(16, 4, 2)), "maps width 32 to itself"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(name: str, make, said: str) -> None:  # type: ignore[no-untyped-def]
    model = build(name)
    block = _block(model)
    with pytest.raises(ValueError, match=said):
        replace_layers(model, make)
    assert _block(model) is block
    assert not any(isinstance(module, BareMoE) for module in model.modules())


def test_ours_are_refused_and_activations_are_compared() -> None:
    with pytest.raises(ValueError, match="is an MoE of moesaic already"):
        replace_layers(small_model(num_hidden_layers=1), with_star)
    model = build("mixtral")
    for layer in moe_layers(model):
        layer.experts.module.act_fn = nn.GELU()
    with pytest.raises(ValueError, match="no gated SiLU experts"):
        trained_experts(moe_layers(model)[0])
