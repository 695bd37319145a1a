"""Every router with every bank, with and without a shared expert: trains, moves, saves, loads, resumes.

A part joins by its line in ``moesaic.models.parts``.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from moesaic.experts import Experts
from moesaic.layers import MoE
from moesaic.models import MoesaicForCausalLM, load
from moesaic.models.parts import BANK_ROUTES, EXPERTS, LOSSES, ROUTERS
from moesaic.routing import end_step
from tests.models.small import VOCABULARY, example, small_model, tokens

STEPS, BATCH, LENGTH = 20, 8, 12
ROUTE_THEMSELVES = [name for name, bank in EXPERTS.items() if bank.route is not Experts.route]
COMBINATIONS = list(itertools.product(ROUTERS, EXPERTS, (False, True)))
COMBINATIONS += itertools.product([BANK_ROUTES], ROUTE_THEMSELVES, (False, True))


def counting(seed: int) -> Tensor:
    """(B, S) ids, each a fixed permutation of the one before it: learned in a few steps."""
    start_B1 = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return (start_B1 + 5 * torch.arange(LENGTH)) % VOCABULARY


def optimizer_of(model: MoesaicForCausalLM) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def train(model: MoesaicForCausalLM, optimizer: AdamW, first: int, steps: int) -> tuple[list[float], Tensor]:
    """Losses, and how often each expert of each MoE layer was used."""
    losses, loads = [], 0
    model.train()
    for step in range(first, first + steps):
        batch = counting(step)
        output = model(input_ids=batch, labels=batch, output_routings=True)
        optimizer.zero_grad()
        output.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), f"step {step}: {name}"
        optimizer.step()
        end_step(model)
        losses.append(float(output.lm_loss.detach()))
        loads = loads + torch.stack([routing.load_E for routing in output.routings])
    model.eval()
    return losses, loads


def expert_weights(model: MoesaicForCausalLM) -> list[list[Tensor]]:
    """Per MoE layer and expert, a copy of its weights as one vector."""
    return [
        [
            torch.cat([weight.flatten() for weight in module.experts.weights([expert]).values()]).detach().clone()
            for expert in range(module.experts.num_experts)
        ]
        for module in model.modules()
        if isinstance(module, MoE)
    ]


@pytest.mark.case("C12")
@pytest.mark.case("C16")
@pytest.mark.parametrize(("router", "experts", "shared"), COMBINATIONS)
def test_trains_saves_loads_and_resumes(router: str, experts: str, shared: bool, tmp_path: Path):
    spec: str | dict[str, str] = {"name": BANK_ROUTES} if router == BANK_ROUTES else router
    model = small_model(spec, experts=example(EXPERTS, experts), shared={"width": 8} if shared else None)
    optimizer = optimizer_of(model)
    start = expert_weights(model)
    losses, load_LE = train(model, optimizer, 0, STEPS)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    for layer, (before, after) in enumerate(zip(start, expert_weights(model), strict=True)):
        for expert, used in enumerate(load_LE[layer].tolist()):
            if used:
                assert not torch.equal(before[expert], after[expert]), f"layer {layer}, expert {expert} stood still"
    assert 2 * (load_LE > 0).sum() > load_LE.numel(), "hardly any expert was used: the test shows nothing"

    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    ids = tokens(BATCH, LENGTH)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)

    # Three steps on from here, by the first model and by the one that was opened again.
    other_optimizer = optimizer_of(again)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, STEPS, 3)[0] == train(again, other_optimizer, STEPS, 3)[0]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_joins_every_layer(loss: str):
    model = small_model(losses=[{"name": loss, "coefficient": 0.1}]).train()
    batch = counting(0)
    output = model(input_ids=batch, labels=batch, output_routings=True)
    assert all(set(routing.losses) == {loss} for routing in output.routings)
    torch.testing.assert_close(output.loss, output.lm_loss + output.aux_loss)
    output.aux_loss.backward()
    assert all(bool(module.router.weight_ED.grad.any()) for module in model.modules() if isinstance(module, MoE))
