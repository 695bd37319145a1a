"""Summaries by hand, a bounded table, and experts that never moved."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.routing import Routing
from moesaic.training import MuonConfig, OptimizerConfig, TrainConfig, Trainer
from moesaic.training.statistics import ExpertMovement, LoadTable, routing_summary
from tests.training import standin


def routing(ids: list[list[int]], experts: int = 4, **options) -> Routing:
    ids_TK = torch.tensor(ids)
    return Routing(ids_TK, torch.where(ids_TK < experts, 0.5, 0.0), experts, **options)


def test_summary_by_hand():
    even = routing([[0, 1], [2, 3]], logits_TE=torch.zeros(2, 4))
    uneven = routing([[0, 1], [0, 4]], logits_TE=torch.tensor([[100.0, 0, 0, 0]] * 2))
    found = routing_summary([even, uneven])
    assert found["max_share"] == pytest.approx(2 / 3)
    assert found["max_over_mean"] == pytest.approx(8 / 3)
    assert found["active_fraction"] == pytest.approx((4 / 8 + 3 / 8) / 2)
    assert found["entropy_mean"] == pytest.approx(math.log(4) / 2, abs=1e-4)
    assert found["entropy_min"] == pytest.approx(0, abs=1e-4)
    assert routing_summary([]) == {}
    assert routing_summary([routing([[4, 4]])]) == {}


def test_the_table_is_bounded_and_covers_the_run():
    table = LoadTable()
    for step in range(3000):
        table.add(step, [routing([[step % 4, 4]]), routing([[0, 1]], experts=5)])
    assert len(table.steps) <= 512
    assert table.steps[0] == 0
    assert table.steps[-1] > 2900
    tensors = table.tensors()
    assert tensors["load.000"].shape == (len(table.steps), 4)
    assert tensors["load.001"].shape == (len(table.steps), 5)
    again = LoadTable()
    again.load(tensors)
    assert again.steps == table.steps
    assert all(torch.equal(a, b) for a, b in zip(again.totals(), table.totals()))


def unmoved(model, **options):
    config = TrainConfig(steps=20, batch=4, length=16, optimizer=OptimizerConfig(**options))
    return Trainer(model, standin.data(), config).train().unmoved


@pytest.mark.case("C16")
@pytest.mark.parametrize(
    "options",
    [
        {"name": "adamw"},
        {"name": "muon"},
        {"name": "muon", "muon": MuonConfig(experts="stack", every=2)},
        {"name": "muon", "muon": MuonConfig(experts="adamw")},
    ],
)
def test_every_expert_moves_under_every_optimizer(options):
    assert unmoved(standin.model(), **options) == []


@pytest.mark.case("C16")
def test_experts_without_a_backward_are_found_though_decay_scales_them():
    class NoBackward(standin.FFNExperts):
        def forward(self, x_TD, routing, context=None):
            return super().forward(x_TD, routing, context).detach() + 0 * self.up_EFD.sum()

    model = standin.model(experts=NoBackward(standin.DIM, 16, 4), layers=("moe",))
    before = model.blocks[0].ffn.experts.up_EFD.detach().clone()
    found = unmoved(model, weight_decay=0.5)
    assert not torch.equal(model.blocks[0].ffn.experts.up_EFD, before)
    assert [(item.bank, item.expert) for item in found] == [("blocks.0.ffn.experts", expert) for expert in range(4)]
    assert all(item.tokens > 0 and item.trainable for item in found)


@pytest.mark.case("C16")
def test_an_expert_nobody_chooses_and_frozen_ones_are_told_apart():
    model = standin.model(bias=True, bias_rate=0.0)
    model.blocks[0].ffn.router.selection_bias_E[2] = -1e9
    model.blocks[1].ffn.experts.requires_grad_(False)
    found = {(item.bank, item.expert): item for item in unmoved(model)}
    never = found.pop(("blocks.0.ffn.experts", 2))
    assert never.tokens == 0
    assert never.trainable
    assert {bank for bank, _ in found} == {"blocks.1.ffn.experts"}
    assert len(found) == 4
    assert not any(item.trainable for item in found.values())


def test_a_matrix_that_started_at_zero_counts_when_it_leaves_zero():
    model = standin.model(layers=("moe",))
    with torch.no_grad():
        model.blocks[0].ffn.experts.down_EDF.zero_()
    movement = ExpertMovement(model)
    assert len(movement.unmoved(0)) == movement.num_experts == 4
    with torch.no_grad():
        model.blocks[0].ffn.experts.down_EDF[1] += 1e-6
    assert [item.expert for item in movement.unmoved(1)] == [0, 2, 3]
