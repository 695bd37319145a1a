"""Optimizer state goes with its experts: training goes on as if they had always been there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moesaic.models.handle import moe_layers
from moesaic.models.surgery import drop_experts, duplicate_experts, reorder_experts
from moesaic.models.surgery_optimizer import remap_optimizer
from moesaic.training.config import OptimizerConfig
from moesaic.training.optimizers import build_optimizers
from moesaic.training.row_adam import RowAdam
from tests.models.families import build, run, token_ids
from tests.models.small import small_model, tokens

ORDER = [3, 1, 0, 2]


def step(model: nn.Module, optimizer: Any, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_commutes_with_reordering(kind: str) -> None:
    results = []
    for early in (True, False):
        model = small_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "muon":
            optimizer = build_optimizers(model, OptimizerConfig())
        for seed in (1, 2):
            step(model, optimizer, tokens(2, 8, seed))
        if early:
            assert remap_optimizer(optimizer, reorder_experts(model, ORDER)) > 0
        step(model, optimizer, tokens(2, 8, 3))
        if not early:
            reorder_experts(model, ORDER)
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], atol=2e-5), name


def test_foreign_models_and_gradients() -> None:
    model = build("qwen3_moe").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, token_ids())
    moment = optimizer.state[model.model.layers[0].mlp.experts.down_proj]["exp_avg"].clone()
    surgery = drop_experts(model, [2])
    assert model.model.layers[0].mlp.experts.down_proj.grad is None
    assert remap_optimizer(optimizer, surgery) == 2 * len(surgery.maps)
    now = optimizer.state[model.model.layers[0].mlp.experts.down_proj]["exp_avg"]
    assert torch.equal(now, moment[[0, 1, 3, 4, 5, 6, 7]])
    remap_optimizer(optimizer, duplicate_experts(model, [0]))
    step(model, optimizer, token_ids())


def test_one_number_a_row() -> None:
    model = small_model()
    weight = model.model.layers[0].mlp.router.weight_ED
    optimizer = RowAdam([weight])
    model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss.backward()
    optimizer.step()
    square = optimizer.state[weight]["square"].clone()
    remap_optimizer(optimizer, reorder_experts(model, ORDER))
    assert torch.equal(optimizer.state[weight]["square"], square[ORDER])


def test_refusals() -> None:
    model, other = small_model(), small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    surgery = drop_experts(model, [0])
    assert remap_optimizer(optimizer, surgery) == 0  # no step taken yet
    with pytest.raises(ValueError, match="none of the parameters"):
        remap_optimizer(torch.optim.AdamW(other.parameters()), surgery)
    step(model, optimizer, tokens(2, 8))
    with pytest.raises(ValueError, match="call once after each change"):
        remap_optimizer(optimizer, surgery)
    with pytest.raises(ValueError, match="must be a torch optimizer, got str"):
        remap_optimizer("adam", surgery)


def test_a_module_for_each_expert_keeps_its_own_state() -> None:
    """Dropping one leaves the others' parameters the same objects; the router's moments follow its rows."""
    model = build("switch_transformers").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run(model).square().mean().backward()
    optimizer.step()
    layer = moe_layers(model)[0]
    third = layer.module.experts["expert_3"].wi.weight
    moment = optimizer.state[layer.shell.router.classifier.weight]["exp_avg"].clone()
    surgery = drop_experts(model, [2])
    assert surgery.bytes[1] < surgery.bytes[0]
    assert layer.module.experts["expert_2"].wi.weight is third
    assert remap_optimizer(optimizer, surgery) == 2 * len(surgery.maps)
    now = optimizer.state[layer.shell.router.classifier.weight]["exp_avg"]
    assert torch.equal(now, moment[[0, 1, 3, 4, 5, 6, 7]])
    optimizer.zero_grad()
    run(model).square().mean().backward()
    optimizer.step()
