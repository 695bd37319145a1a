"""The step's loss: linear in its coefficients, and the same however a step is cut into micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moesaic.data.packing import Batch
from moesaic.experts import FFNExperts
from moesaic.training import TrainConfig, Trainer
from moesaic.training.causal_lm import causal_lm_loss
from moesaic.training.task import auxiliary_terms, step_loss
from tests.training import standin


def gradients(model: nn.Module, batches: list[Batch], lm: float = 1.0, aux: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    targets = sum(batch.num_targets for batch in batches)
    for batch in batches:
        step_loss(causal_lm_loss(model, batch), batch.num_targets, targets, lm, aux).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.case("C10")
def test_one_micro_batch_four_times_gives_its_own_gradient():
    model, batch = standin.model(coefficient=0.5), standin.data().train.batch(0, 4, 16)
    close(gradients(model, [batch] * 4), gradients(model, [batch]))


@pytest.mark.case("C10")
def test_unequal_micro_batches_are_weighed_by_their_targets():
    model, data = standin.model(coefficient=0.0), standin.data().train
    long, short = data.batch(0, 4, 16), data.batch(1, 1, 16)
    both = Batch(torch.cat([long.inputs_BS, short.inputs_BS]), torch.cat([long.targets_BS, short.targets_BS]), None, 80)
    close(gradients(model, [long, short]), gradients(model, [both]))


@pytest.mark.case("C10")
def test_the_auxiliary_loss_of_unequal_micro_batches_is_their_token_weighted_mean():
    model, data = standin.model(coefficient=0.5), standin.data().train
    long, short = data.batch(0, 3, 16), data.batch(1, 1, 16)
    together = gradients(model, [long, short], lm=0.0)
    parts = [gradients(model, [batch], lm=0.0) for batch in (long, short)]
    close(together, {name: 0.75 * parts[0][name] + 0.25 * parts[1][name] for name in together})


@pytest.mark.case("C09")
def test_the_balance_gradient_reaches_the_router_and_is_linear_in_its_coefficient():
    batch = standin.data().train.batch(0, 4, 16)
    found = {}
    for coefficient in (0.0, 1e-3, 1e-2):
        model = standin.model(coefficient=coefficient)
        for block in model.blocks:
            block.ffn.experts.requires_grad_(False)
        grads = gradients(model, [batch], lm=0.0)
        found[coefficient] = grads["blocks.1.ffn.router.weight_ED"]
    assert found[0.0].norm() == 0
    assert found[1e-3].norm() > 0
    torch.testing.assert_close(found[1e-2], 10 * found[1e-3], rtol=1e-4, atol=1e-9)


@pytest.mark.case("C09")
@pytest.mark.parametrize("aux", [0.0, 1.0, 2.0])
def test_through_the_trainer_the_factor_scales_the_router_gradient(aux):
    model = standin.model(coefficient=0.01)
    config = TrainConfig(steps=1, batch=4, length=16, main=0.0, aux=aux, clip=None)
    trainer = Trainer(model, standin.data(), config)
    seen = []
    trainer.state.optimizers.step = lambda: seen.append(model.blocks[0].ffn.router.weight_ED.grad)
    trainer.train()
    expected = gradients(standin.model(coefficient=0.01), [standin.data().train.batch(0, 4, 16)], lm=0.0)
    got = torch.zeros(4, standin.DIM) if seen[0] is None else seen[0]
    torch.testing.assert_close(got, aux * expected["blocks.0.ffn.router.weight_ED"], rtol=1e-5, atol=1e-9)


def test_losses_are_summed_per_layer_and_named():
    model, batch = standin.model(coefficient=0.5), standin.data().train.batch(0, 4, 16)
    loss = causal_lm_loss(model, batch)
    assert len(loss.routings) == 2
    terms = auxiliary_terms(loss.routings)
    assert terms["balance"].item() == pytest.approx(loss.aux.item())
    assert causal_lm_loss(standin.model(layers=("dense",)), batch).aux is None


def test_targets_that_do_not_count_and_padding():
    model, batch = standin.model(coefficient=0.0), standin.data().train.batch(0, 2, 16)
    inputs = torch.cat([batch.inputs_BS, torch.zeros(2, 4, dtype=torch.long)], 1)
    targets = torch.cat([batch.targets_BS, torch.full((2, 4), -100)], 1)
    mask = torch.cat([torch.ones(2, 16), torch.zeros(2, 4)], 1).bool()
    padded = Batch(inputs, targets, mask, 32)
    assert causal_lm_loss(model, padded).total.item() == pytest.approx(
        causal_lm_loss(model, batch).total.item(), rel=1e-5
    )
    assert isinstance(model.blocks[0].ffn.experts, FFNExperts)


@pytest.mark.slow
@pytest.mark.case("C09")
def test_under_compile_the_gradient_reaches_the_router_or_the_run_says_it_went_eager():
    moved = []
    for compiled in (False, True):
        model = standin.model(coefficient=0.01)
        config = TrainConfig(steps=1, batch=4, length=16, main=0.0, clip=None, compile=compiled)
        trainer = Trainer(model, standin.data(), config)
        seen = []
        trainer.state.optimizers.step = lambda seen=seen, model=model: seen.append(
            model.blocks[0].ffn.router.weight_ED.grad.clone()
        )
        report = trainer.train()
        assert len(report.notes) <= int(compiled)
        moved += seen
    assert moved[0].norm() > 0
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-8)
