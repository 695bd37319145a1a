"""Losses of a routing: values by hand, padding, empty batches, gradients, scopes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.layers import MoE
from moesaic.losses import (
    BalanceLoss,
    EntropyLoss,
    ImportanceLoss,
    RoutingLoss,
    ZLoss,
    balance_loss,
    entropy_loss,
    importance_loss,
    mean_entropy_loss,
    z_loss,
)
from moesaic.routing import Context, ReLURouter, Routing, TopKRouter, end_step
from tests.routing.helpers import MatrixBank, padded, rows

FUNCTIONS: list[Callable[[Routing], Tensor]] = [
    balance_loss,
    importance_loss,
    z_loss,
    entropy_loss,
    mean_entropy_loss,
]
PARTS: list[Callable[[float], RoutingLoss]] = [
    BalanceLoss,
    lambda coefficient: BalanceLoss(coefficient, scope="sequence"),
    lambda coefficient: BalanceLoss(coefficient, scope="global"),
    ImportanceLoss,
    ZLoss,
    EntropyLoss,
    lambda coefficient: EntropyLoss(coefficient, of="mean"),
]


def of_probs(probs: list[list[float]], ids: list[list[int]], mask: list[bool] | None = None) -> Routing:
    """Softmax routing with given probabilities; the weights are those of the chosen experts."""
    logits = torch.tensor(probs).log().requires_grad_()
    ids_TK = torch.tensor(ids)
    dense = torch.cat([torch.tensor(probs), torch.zeros(len(probs), 1)], 1)
    return Routing(ids_TK, dense.gather(1, ids_TK), len(probs[0]), logits, None if mask is None else torch.tensor(mask))


# Two rows over two experts: P = (0.55, 0.45); both rows choose expert 0, or one each.
PROBS = [[0.8, 0.2], [0.3, 0.7]]


def test_balance_by_hand() -> None:
    assert balance_loss(of_probs(PROBS, [[0], [1]])).item() == pytest.approx(2 * (0.5 * 0.55 + 0.5 * 0.45))
    assert balance_loss(of_probs(PROBS, [[0], [0]])).item() == pytest.approx(2 * 0.55)
    variable = of_probs(PROBS, [[0, 1], [0, 2]])  # the second row uses one expert: f = (2/3, 1/3)
    assert balance_loss(variable).item() == pytest.approx(2 * (2 / 3 * 0.55 + 1 / 3 * 0.45))
    other = torch.tensor([1, 3])
    assert balance_loss(variable, load_E=other).item() == pytest.approx(2 * (0.25 * 0.55 + 0.75 * 0.45))


def test_balance_per_sequence_by_hand() -> None:
    routing = of_probs([[0.8, 0.2], [0.3, 0.7], [0.5, 0.5], [0.1, 0.9]], [[0], [0], [1], [0]])
    groups = torch.tensor([7, 7, -1, 7])
    # Group 7: f = (1, 0), P_0 = 1.2 / 3; group -1: f = (0, 1), P_1 = 0.5.
    assert balance_loss(routing, group_T=groups).item() == pytest.approx((2 * 0.4 + 2 * 0.5) / 2)
    whole = balance_loss(routing, group_T=torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(whole, balance_loss(routing))


def test_importance_by_hand() -> None:
    # Importance (0.8, 0.7): mean 0.75, population variance 0.0025.
    assert importance_loss(of_probs(PROBS, [[0], [1]])).item() == pytest.approx(0.0025 / 0.5625, rel=1e-5)
    assert importance_loss(of_probs(PROBS, [[0], [0]])).item() == pytest.approx(1.0)
    tiny = of_probs(PROBS, [[0], [0]])
    assert importance_loss(tiny.replace(weights_TK=tiny.weights_TK * 1e-30)).item() == pytest.approx(1.0)


def test_z_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2, logits)
    assert z_loss(routing).item() == pytest.approx((math.log(2) ** 2 + math.log(4) ** 2) / 2)


def test_entropies_by_hand() -> None:
    def entropy(*values: float) -> float:
        return -sum(value * math.log(value) for value in values)

    routing = of_probs(PROBS, [[0], [1]])
    assert entropy_loss(routing).item() == pytest.approx((entropy(0.8, 0.2) + entropy(0.3, 0.7)) / 2)
    assert mean_entropy_loss(routing).item() == pytest.approx(math.log(2) - entropy(0.55, 0.45), rel=1e-4)


@pytest.mark.case("C08")
@pytest.mark.parametrize("top_k", [1, 2])
def test_collapse_gives_the_known_maximum_and_a_gradient_towards_balance(top_k: int) -> None:
    experts = 8
    logits = torch.zeros(32, experts)
    logits[:, :top_k] = 20.0
    logits.requires_grad_()
    router = TopKRouter(8, experts, top_k)
    routing = router.decide(logits, router.choose(logits, Context()), Context())
    assert routing.load_E[:top_k].tolist() == [32] * top_k
    assert balance_loss(routing).item() == pytest.approx(experts / top_k, rel=1e-5)
    assert importance_loss(routing).item() == pytest.approx(experts / top_k - 1, rel=1e-4)
    assert mean_entropy_loss(routing).item() == pytest.approx(math.log(experts / top_k), rel=1e-4)
    mild = (logits.detach() / 10).requires_grad_()  # collapsed choices, probabilities not yet saturated
    balance_loss(router.decide(mild, router.choose(mild, Context()), Context())).backward()
    assert mild.grad is not None
    gradient = mild.grad.sum(0)
    assert (gradient[:top_k] > 0.05).all()
    assert (gradient[top_k:] < 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_exactly_uniform_loads_have_finite_gradients(function: Callable[[Routing], Tensor]) -> None:
    logits = torch.zeros(4, 4, requires_grad=True)
    ids = torch.arange(4)[:, None]
    routing = Routing(ids, logits.softmax(-1).gather(1, ids), 4, logits)
    value = function(routing)
    value.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    expected = {balance_loss: 1.0, importance_loss: 0.0, z_loss: math.log(4) ** 2, entropy_loss: math.log(4)}
    assert value.item() == pytest.approx(expected.get(function, 0.0), abs=1e-6)


@pytest.mark.parametrize("function", [entropy_loss, mean_entropy_loss, balance_loss])
def test_saturated_probabilities_have_finite_gradients(function: Callable[[Routing], Tensor]) -> None:
    logits = torch.tensor([[500.0, 0.0, -500.0]]).requires_grad_()
    routing = Routing(torch.tensor([[0]]), torch.ones(1, 1), 3, logits)
    function(routing).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.case("C06")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_value_nor_gradient(part: Callable[[float], RoutingLoss], side: str) -> None:
    def run(x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        router = TopKRouter(8, 4, 2)
        value = part(1.0)(router(x, context), context)
        (gradient,) = torch.autograd.grad(value, router.weight_ED)
        return value, gradient

    sequence = rows(9)
    value, gradient = run(sequence, Context.from_mask(None, 1, 9))
    for seed in (1, 2):
        filler = rows(1, 8, seed) * 10
        x, context = padded([sequence], side, 36, filler)
        padded_value, padded_gradient = run(x, context)
        torch.testing.assert_close(padded_value, value)
        torch.testing.assert_close(padded_gradient, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.case("C06")
@pytest.mark.parametrize("part", PARTS)
def test_padding_of_a_foreign_routing_may_hold_anything(part: Callable[[float], RoutingLoss]) -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, math.inf]], requires_grad=True)
    real = torch.tensor([True, False])
    routing = Routing(torch.tensor([[1], [2]]), torch.tensor([[1.0], [0.0]]), 2, logits, real)
    value = part(1.0)(routing, Context.from_mask(real[:, None], 2, 1))
    assert torch.isfinite(value)
    if value.requires_grad:  # the importance of these weights does not depend on the logits
        value.backward()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert logits.grad[1].abs().max() == 0


@pytest.mark.case("C06")
@pytest.mark.case("C14")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["all padding", "no rows", "no slots"])
def test_nothing_to_count_gives_zero(part: Callable[[float], RoutingLoss], kind: str) -> None:
    count = 0 if kind == "no rows" else 6
    mask = torch.full((2, count // 2), kind == "no slots")
    context = Context.from_mask(mask, 2, count // 2)
    loss = part(1.0)
    if kind == "no slots":
        router = ReLURouter(8, 4, 1.0)
        with torch.no_grad():
            router.weight_ED.fill_(-1.0)
        routing = router(rows(count).abs(), context)
        assert routing.slots == 0
    else:
        routing = TopKRouter(8, 4, 2)(rows(count), context)
    value = loss(routing, context)
    assert torch.isfinite(value)
    if kind != "no slots" or isinstance(loss, BalanceLoss | ImportanceLoss):
        assert value == 0
    value.backward()


@pytest.mark.case("C09")
@pytest.mark.parametrize("part", PARTS)
def test_gradient_reaches_the_router_and_is_linear_in_the_coefficient(part: Callable[[float], RoutingLoss]) -> None:
    x, context = rows(40), Context.from_mask(None, 4, 10)

    def gradient(coefficient: float) -> Tensor:
        torch.manual_seed(0)
        layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2), losses=[part(coefficient)])
        y, routing = layer(x, context)
        (0.0 * y.sum() + sum(routing.losses.values())).backward()
        assert isinstance(layer.router, TopKRouter)
        assert layer.router.weight_ED.grad is not None
        return layer.router.weight_ED.grad

    assert gradient(0.0).abs().max() == 0
    small = gradient(1e-3)
    assert small.abs().max() > 1e-7
    torch.testing.assert_close(gradient(1e-2), 10 * small, rtol=1e-4, atol=1e-9)
    assert torch.equal(gradient(2.0**-5), 8 * gradient(2.0**-8))


@pytest.mark.case("C10")
@pytest.mark.parametrize("part", PARTS)
def test_a_repeated_micro_batch_gives_the_gradient_of_one(part: Callable[[float], RoutingLoss]) -> None:
    x, context = rows(40), Context.from_mask(None, 4, 10)

    def gradient(repeats: int) -> Tensor:
        torch.manual_seed(0)
        layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2), losses=[part(1.0)])
        for _ in range(repeats):
            y, routing = layer(x, context)
            ((y.square().mean() + sum(routing.losses.values())) / repeats).backward()
        assert isinstance(layer.router, TopKRouter)
        assert layer.router.weight_ED.grad is not None
        return layer.router.weight_ED.grad

    torch.testing.assert_close(gradient(4), gradient(1), rtol=1e-5, atol=1e-7)


@pytest.mark.case("C10")
def test_global_scope_uses_the_loads_of_the_step_so_far() -> None:
    loss = BalanceLoss(1.0, scope="global")
    first, second = of_probs(PROBS, [[0], [0]]), of_probs(PROBS, [[1, 2], [1, 0]])
    assert loss(first, Context()).item() == pytest.approx(2 * 0.55)
    # Loads so far (2, 0) + (1, 2).
    assert loss(second, Context()).item() == pytest.approx(2 * (0.6 * 0.55 + 0.4 * 0.45))
    loss.eval()
    assert loss(second, Context()).item() == pytest.approx(balance_loss(second).item())
    loss.train()
    end_step(loss)
    assert loss(second, Context()).item() == pytest.approx(balance_loss(second).item())


@pytest.mark.case("C11")
def test_global_scope_counts_a_recomputed_block_once() -> None:
    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2), losses=[BalanceLoss(1.0, scope="global")])

        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            y, routing = layer(x)
            return y, routing.losses["balance_global"]

        values = []
        for seed in range(3):
            x = rows(20, seed=seed).requires_grad_()
            y, loss = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            (y.square().mean() + loss).backward()
            values.append(loss.detach())
        return values + [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]

    for plain, again in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-8)


def test_layers_that_collapse_in_opposite_ways_do_not_cancel() -> None:
    x = rows(20).abs()
    total = 0.0
    for expert in (0, 1):
        layer = MoE(MatrixBank(8, 2), TopKRouter(8, 2, 1), losses=[BalanceLoss(1.0)])
        with torch.no_grad():
            layer.router.weight_ED.fill_(-9.0)  # type: ignore[union-attr,operator]
            layer.router.weight_ED[expert] = 9.0  # type: ignore[union-attr,index]
        total += layer(x)[1].losses["balance"].item()
    assert total == pytest.approx(4.0, rel=1e-4)


def test_evaluation_does_not_move_with_the_coefficient() -> None:
    outputs = []
    for coefficient in (0.0, 1.0):
        torch.manual_seed(0)
        layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2), losses=[BalanceLoss(coefficient)]).eval()
        outputs.append(layer(rows(10))[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("function", [balance_loss, z_loss, entropy_loss, mean_entropy_loss])
def test_a_routing_without_logits_is_refused(function: Callable[[Routing], Tensor]) -> None:
    with pytest.raises(ValueError, match="logits_TE"):
        function(Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2))


def test_doors() -> None:
    for coefficient in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="coefficient must be finite and >= 0"):
            BalanceLoss(coefficient)
    with pytest.raises(ValueError, match="scope must be one of"):
        BalanceLoss(scope="layer")
    with pytest.raises(ValueError, match="of must be one of"):
        EntropyLoss(of="column")
    routing = of_probs(PROBS, [[0], [1]])
    with pytest.raises(ValueError, match=r"BalanceLoss\(scope='sequence'\) needs group_T"):
        BalanceLoss(scope="sequence")(routing, Context())
    with pytest.raises(ValueError, match="one entry for each of 2 decisions"):
        balance_loss(routing, group_T=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="load_E must have shape"):
        balance_loss(routing, load_E=torch.ones(3))
    with pytest.raises(ValueError, match="not both"):
        balance_loss(routing, load_E=torch.ones(2), group_T=torch.zeros(2, dtype=torch.int64))


def test_losses_are_parts_with_names_of_their_own() -> None:
    parts = [part(0.1) for part in PARTS]
    assert len({part.name for part in parts}) == len(parts)
    layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2), losses=parts)
    _, routing = layer(rows(12), Context.from_mask(None, 3, 4))
    assert set(routing.losses) == {part.name for part in parts}
    assert isinstance(layer.losses, nn.ModuleList)
