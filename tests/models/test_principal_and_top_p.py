"""STAR and DTop-p inside whole models: ours, and transformers' own through `override_routing`."""

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic import routing
from moesaic.layers.intervention import Call
from moesaic.models import MoesaicConfig, MoesaicForCausalLM, override_routing, record_routing
from moesaic.routing import DynamicTopPRouter, PrincipalSubspaceRouter, Router, Routing, end_step, share_controllers

D, E = 32, 8
SIZES = {
    "vocab_size": 40,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def foreign(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E, num_experts_per_tok=2))
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=E, num_experts_per_tok=2, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def ours(router: dict) -> MoesaicForCausalLM:  # type: ignore[type-arg]
    torch.manual_seed(0)
    return MoesaicForCausalLM(MoesaicConfig(**SIZES, num_experts=E, expert_width=16, router=router))


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(seed))


class Beside(nn.Module):
    """Routers that stand beside a model and decide for it."""

    def __init__(self, routers: list[Router]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(routers)

    def route(self, call: Call) -> Routing:
        decided: Routing = self.routers[call.layer.index](call.x_TD, call.context)
        return decided


def routers_for(kind: str) -> Beside:
    torch.manual_seed(1)
    make = {
        "star": lambda: PrincipalSubspaceRouter(D, E, 2, basis_lr=0.05),
        "dtop-p": lambda: DynamicTopPRouter(D, E, 3),
    }[kind]
    return Beside([make() for _ in range(2)])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", ["star", "dtop-p"])
def test_dropped_into_a_transformers_model_they_route_and_learn(family: str, kind: str) -> None:
    model, routers = foreign(family), routers_for(kind)
    share_controllers(routers)
    optimizer = torch.optim.AdamW([*model.parameters(), *routers.parameters()], lr=3e-3)
    before = {name: value.detach().clone() for name, value in routers.state_dict().items()}
    losses = []
    ids = tokens()
    with override_routing(model, routers.route):
        for _ in range(15):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            end_step(routers)
            losses.append(float(loss.detach()))
    # Opened first, so it sees what the override inside it decided.
    with record_routing(model) as record, override_routing(model, routers.route):
        model.eval()(ids)
    assert losses[-1] < losses[0] - 0.3
    for name, value in routers.state_dict().items():
        assert not torch.equal(value, before[name]), name
    assert len(record.calls) == 2
    if kind == "dtop-p":
        active = torch.stack([call.routing.active_T.double().mean() for call in record.calls])
        assert float(active.mean()) == pytest.approx(3, abs=0.8)


@pytest.mark.spec("star-routing", "6.7")
def test_adaptation_of_routers_beside_a_transformers_model() -> None:
    model, routers = foreign("qwen3_moe").eval(), routers_for("star")
    bases = [router.subspace.basis_KD.clone() for router in routers.routers]
    with (
        override_routing(model, routers.route),
        routing.test_time_adaptation(routers),
    ):
        model(tokens())
        moved = [router.subspace.basis_KD.clone() for router in routers.routers]
    for basis, was, router in zip(bases, moved, routers.routers, strict=True):
        assert not torch.equal(basis, was)
        assert torch.equal(basis, router.subspace.basis_KD)


@pytest.mark.spec("star-routing", "6.9")
def test_our_model_with_checkpointing_moves_the_basis_once() -> None:
    plain, checkpointed = (ours({"name": "principal_subspace", "top_k": 2, "basis_lr": 0.05}) for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        model.train()(tokens(), labels=tokens()).loss.backward()
        end_step(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, checkpointed.state_dict()[name]), name


@pytest.mark.spec("dtop-p", "6.7")
def test_controllers_of_layers_survive_a_bf16_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ours({"name": "dynamic_top_p", "target": 3, "scope": "layer"})
    model.train()(tokens())
    end_step(model)
    model.save_pretrained(tmp_path)
    again = MoesaicForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for one, two in zip(model.modules(), again.modules(), strict=True):
        if isinstance(one, DynamicTopPRouter):
            assert one.controller.calibrated
            assert (one.controller.p, one.controller.error_sum) == (two.controller.p, two.controller.error_sum)


@pytest.mark.spec("dtop-p", "6.7")
def test_our_model_has_one_controller_that_is_saved_and_goes_on_bit_for_bit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ours({"name": "dynamic_top_p", "target": 3, "ki": 0.3})

    def run(one: nn.Module) -> list[float]:
        found = []
        for seed in range(3):
            one.train()(tokens(seed))
            end_step(one)
            found.append(one.model.threshold_controllers[0].p)  # type: ignore[index, union-attr]
        return found

    run(model)
    assert sum("state_bytes" in name for name in model.state_dict()) == 1
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = MoesaicForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert again.model.threshold_controllers[0].p == model.model.threshold_controllers[0].p
        assert again.model.threshold_controllers[0].error_sum == model.model.threshold_controllers[0].error_sum
    again = MoesaicForCausalLM.from_pretrained(tmp_path)
    assert run(again) == run(model)


def test_the_basis_survives_saving_and_a_bf16_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = ours({"name": "principal_subspace", "top_k": 2})
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = MoesaicForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, value in model.state_dict().items():
            if "basis_KD" in name:
                assert torch.equal(again.state_dict()[name], value), name
