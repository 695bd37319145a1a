"""Optimizers of transformers' MoE families: role and group of every parameter, under the rules of our own models."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from moesaic.models.handle import moe_layers
from moesaic.models.parameter_roles import model_parameter_specs
from moesaic.routing import parameter_specs
from moesaic.training import MuonConfig, OptimizerConfig, build_optimizers
from tests.models.families import FAMILIES, build
from tests.training import standin

DECAY = 0.1


def groups(model: nn.Module, config: OptimizerConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (part, group)
        for part, optimizer in build_optimizers(model, config).parts.items()
        for group in optimizer.param_groups
        for p in group["params"]
    }


def parts_of(model: nn.Module) -> tuple[dict[int, str], dict[int, bool]]:
    """Parameters of routers and banks by identity, and whether a bank is stored transposed."""
    where: dict[int, str] = {}
    turned: dict[int, bool] = {}
    for layer in moe_layers(model):
        assert layer.shell is not None
        where.update({id(p): "router" for p in layer.shell.router.parameters()})
        for p in layer.shell.experts.module.parameters():
            where[id(p)] = "bank"
            turned[id(p)] = bool(getattr(layer.shell.experts, "transposed", False))
    return where, turned


OTHER = ("jetmoe", "dbrx", "switch_transformers", "nllb_moe", "doge")  # structures of their own


@pytest.mark.parametrize("name", [name for name in OTHER if name in FAMILIES])
def test_roles_in_structures_of_their_own(name: str) -> None:
    model = build(name)
    found = groups(model, OptimizerConfig(name="muon", weight_decay=DECAY))
    specs = {name: spec for name, _, spec in model_parameter_specs(model)}
    experts = [key for key, spec in specs.items() if spec.role in ("expert-in", "expert-out")]
    routers = [key for key, spec in specs.items() if spec.role == "router"]
    assert {specs[key].role for key in experts} == {"expert-in", "expert-out"} and routers
    for key in routers:
        assert found[key][0] == "adamw" and found[key][1]["weight_decay"] == 0.0, key
    for key in experts:  # an expert that is one row of a table is no matrix
        assert found[key][0] == ("adamw" if specs[key].axes == ("expert", "model") else "muon"), key
        assert found[key][1]["weight_decay"] == DECAY, key
    assert not any("attn" in key.rsplit(".", 2)[0] and "experts" not in key for key in experts if name != "jetmoe")


@pytest.mark.parametrize("experts", ["each", "stack", "adamw"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHER])
def test_role_and_group_of_every_parameter(name: str, experts: str) -> None:
    model = build(name)
    where, turned = parts_of(model)
    config = OptimizerConfig(
        name="muon", weight_decay=DECAY, role_lr={"router": 0.5}, muon=MuonConfig(expert_lr=0.04, experts=experts)
    )
    found = groups(model, config)
    specs = {name: spec for name, _, spec in model_parameter_specs(model)}
    before = {name: spec for name, _, spec in parameter_specs(model)}
    assert specs.keys() == dict(model.named_parameters()).keys()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    assert found.keys() == trained.keys()
    frozen = [specs[key].role for key in specs if key not in trained]  # biases for choosing
    assert set(frozen) <= {"bias"}
    seen = set()
    for key, parameter in trained.items():
        part, group = found[key]
        role, place = specs[key].role, where.get(id(parameter))
        if place == "router":
            assert part == "adamw" and group["weight_decay"] == 0.0, key
            assert role in ("router", "norm", "bias", "scalar"), key
            assert (role == "router") == (parameter.dim() == 2 and "bias" not in key), key
            assert group["lr"] == (0.5 if role == "router" else config.lr), key
        elif place == "bank" and parameter.dim() == 3:
            into = re.search(r"(gate_)?up_proj$", key) is not None
            assert role == ("expert-in" if into else "expert-out"), key
            assert specs[key].axes[0] == "expert" and "width" in specs[key].axes
            if experts == "adamw":
                assert part == "adamw" and group["weight_decay"] == DECAY, key
            else:
                assert part == "muon" and group["lr"] == 0.04 and group["weight_decay"] == DECAY, key
                assert group["transposed"] is turned[id(parameter)], key
                width = 1 if into != turned[id(parameter)] else 2
                assert group["stack"] == (width if experts == "stack" else None), key
        elif place == "bank" and parameter.dim() == 2:
            assert role == "expert-bias" and part == "adamw" and group["weight_decay"] == 0.0, key
        else:
            assert specs[key] == before[key], key
        seen.add(role)
    assert {"router", "expert-in", "expert-out"} <= seen
    assert ("expert-bias" in seen) == (name in ("gpt_oss", "openai_privacy_filter"))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_the_router_neither_decays_nor_is_orthogonalised(name: str) -> None:
    """A step without a gradient moves what decays and nothing else."""
    model = build(name)
    optimizers = build_optimizers(model, OptimizerConfig(name="muon", lr=0.1, weight_decay=0.5))
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    moved = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    layers = moe_layers(model)
    assert not any(key.startswith(f"{layer.name}.{part}.") for key in moved for layer in layers for part in ("gate",))
    assert not any("router" in key or "bias" in key or "norm" in key for key in moved)
    assert all(f"{layer.name}.experts.down_proj" in moved for layer in layers)


def test_stacked_experts_are_orthogonalised_each_by_itself() -> None:
    model = build("gpt_oss")
    bank = moe_layers(model)[0].experts.module
    optimizers = build_optimizers(model, OptimizerConfig(name="muon", weight_decay=0.0, muon=MuonConfig(lr=1.0)))
    before = bank.down_proj.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizers.step()
    step = before - bank.down_proj.detach()
    into, out = step.shape[1:]  # stored (in, out)
    singular = torch.linalg.svdvals(step) / math.sqrt(max(1.0, out / into))
    assert bool(((singular > 0.7) & (singular < 1.3)).all())


def test_one_decay_for_all_matrices_unless_muon_has_its_own() -> None:
    model = standin.model(layers=("moe", "dense"))
    for own, want in ((None, 0.3), (0.05, 0.05), (0.0, 0.0)):
        config = OptimizerConfig(name="muon", weight_decay=0.3, muon=MuonConfig(weight_decay=own))
        decays = {group["weight_decay"] for part, group in groups(model, config).values() if part == "muon"}
        assert decays == {want}
        others = {group["weight_decay"] for part, group in groups(model, config).values() if part == "adamw"}
        assert others == {0.0, 0.3}


def test_a_model_without_experts_has_its_roles_as_before() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    assert list(model_parameter_specs(model)) == list(parameter_specs(model))
