"""ReLU routing: the weights, the L1 term by hand, and the controller that holds the target."""

from __future__ import annotations

import pytest
import torch

from moesaic.layers import MoE
from moesaic.routing import Context, L1Controller, ReLURouter, end_step
from tests.routing.helpers import MatrixBank, padded, rows


def hand_router(balance: bool) -> ReLURouter:
    router = ReLURouter(3, 3, 1.5, balance=balance)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(3))
        router.controller.coefficient.fill_(0.5)
    return router


X = torch.tensor([[1.0, 2.0, -1.0], [3.0, -1.0, -1.0], [-1.0, -2.0, 0.0]])


def test_weights_are_the_positive_logits_and_a_row_may_use_none() -> None:
    routing = hand_router(True)(X)
    assert routing.expert_ids_TK.tolist() == [[0, 1], [0, 3], [3, 3]]
    assert routing.weights_TK.tolist() == [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]
    assert routing.load_E.tolist() == [2, 1, 0]
    y, _ = MoE(MatrixBank(3, 3), hand_router(True))(X)
    assert y[2].abs().max() == 0


def test_l1_term_by_hand() -> None:
    # Sums of weights: 4, 2, 0 over T = 3 rows. Balanced: f = E / (k T) * load = 3 / 4.5 * (2, 1, 0).
    assert hand_router(False)(X).losses["relu_l1"].item() == pytest.approx(1.0)
    assert hand_router(True)(X).losses["relu_l1"].item() == pytest.approx(0.5 * (4 * 4 / 3 + 2 * 2 / 3) / 3)


def test_l1_gradient_ignores_the_load_and_reaches_only_used_experts() -> None:
    router = hand_router(True)
    router(X).losses["relu_l1"].backward()
    assert router.weight_ED.grad is not None
    expected = torch.zeros(3, 3)
    expected[0] = 0.5 / 3 * 4 / 3 * (X[0] + X[1])
    expected[1] = 0.5 / 3 * 2 / 3 * X[0]
    torch.testing.assert_close(router.weight_ED.grad, expected)


@pytest.mark.case("C06")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_nowhere(side: str) -> None:
    router = hand_router(True)
    x, context = padded([X], side, 12, filler=7.0)
    routing = router(x, context)
    torch.testing.assert_close(routing.losses["relu_l1"], hand_router(True)(X).losses["relu_l1"])
    end_step(router)
    alone = hand_router(True)
    alone(X)
    end_step(alone)
    assert router.controller.coefficient == alone.controller.coefficient
    empty = router(x, Context(token_mask_T=torch.zeros(12, dtype=torch.bool)))
    assert empty.losses["relu_l1"] == 0
    assert empty.slots == 0


def test_coefficient_moves_once_a_step_by_the_sign() -> None:
    router = hand_router(True)
    router(X)  # 3 of a target of 4.5 used: too sparse
    router(X)
    end_step(router)
    assert router.controller.coefficient.item() == pytest.approx(0.5 / 1.2)
    router(X.abs() + 0.1)  # 9 used: too dense
    end_step(router)
    assert router.controller.coefficient.item() == pytest.approx(0.5)
    router(torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, -1.0]]))  # exactly 1.5 a row
    end_step(router)
    router.end_step()  # nothing seen
    assert router.controller.coefficient.item() == pytest.approx(0.5)


def test_coefficient_stays_in_its_range() -> None:
    controller = L1Controller(4, 1.0, factor=1e3)
    dense, sparse = ReLURouter(8, 4, 1.0, controller=controller), rows(5)
    with torch.no_grad():
        dense.weight_ED.fill_(1.0)
    for sign, bound in ((1.0, 1e6), (-1.0, 1e-12)):
        for _ in range(12):
            dense(sparse.abs() * sign)
            end_step(dense)
        assert controller.coefficient.item() == pytest.approx(bound)


def test_training_reaches_the_target() -> None:
    torch.manual_seed(0)
    router = ReLURouter(8, 8, 2.0)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.01)
    used = []
    shared = torch.tensor([1.0] + [0.0] * 7)  # a direction that all rows share: what a logit can fall along
    for step in range(250):
        routing = router(rows(64, seed=step) + shared)
        loss = (routing.weights_TE.sum(1) - 1).square().mean() + routing.losses["relu_l1"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step(router)
        used.append(routing.active_T.double().mean().item())
    assert used[0] > 3
    assert sum(used[-30:]) / 30 == pytest.approx(2.0, abs=0.4)


def test_layers_may_share_a_controller() -> None:
    controller = L1Controller(4, 1.0)
    layers = torch.nn.ModuleList(ReLURouter(8, 4, 1.0, controller=controller) for _ in range(3))
    with torch.no_grad():
        for index, router in enumerate(layers):
            router.weight_ED.fill_(1.0 if index == 0 else -1.0)
        for router in layers:
            router(rows(6).abs())  # 4, 0, 0 experts: 1.33 on average, above the target
    end_step(layers)
    assert controller.coefficient.item() == pytest.approx(1.2e-8)
    assert layers[2].controller is controller


def test_choice_restricted_and_weighed() -> None:
    router = hand_router(True)
    logits = router(X).logits_TE
    assert logits is not None
    allowed = torch.tensor([False, True, True]).expand(3, 3)
    assert router.choose(logits, Context(), allowed).tolist() == [[1], [3], [3]]
    assert router.weigh(logits, torch.tensor([[2], [0], [3]]), Context()).tolist() == [[0.0], [3.0], [0.0]]


@pytest.mark.case("C14")
def test_no_rows() -> None:
    routing = ReLURouter(8, 4, 1.0)(rows(0))
    assert routing.expert_ids_TK.shape == (0, 0)
    assert routing.losses["relu_l1"] == 0


def test_state_is_saved_and_stays_float32() -> None:
    router = hand_router(True).bfloat16()
    router(X)
    end_step(router)
    assert router.controller.coefficient.dtype == torch.float32
    other = hand_router(True)
    other.load_state_dict(router.state_dict())
    assert other.controller.coefficient == router.controller.coefficient != 0.5


def test_doors() -> None:
    for target in (0.0, 4.0, 5.0):
        with pytest.raises(ValueError, match=r"target must lie in \(0, num_experts = 4\)"):
            ReLURouter(8, 4, target)
    with pytest.raises(ValueError, match="factor must be finite and above 1"):
        L1Controller(4, 1.0, factor=1.0)
    with pytest.raises(ValueError, match="start must lie in"):
        L1Controller(4, 1.0, start=0.0)
    with pytest.raises(ValueError, match=r"controller holds 2\.0 of 4 experts"):
        ReLURouter(8, 4, 1.0, controller=L1Controller(4, 2.0))
