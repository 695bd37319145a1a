"""Routing and Dispatch: one sparse matrix, its derived views, its doors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.routing import Dispatch, Routing, checks


def random_routing(num_rows: int, slots: int, experts: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_rows, experts, generator=generator).argsort(1)[:, :slots]
    empty = torch.rand(num_rows, slots, generator=generator) < 0.3
    weights = torch.rand(num_rows, slots, generator=generator) + 0.1
    return Routing(order.masked_fill(empty, experts), weights.masked_fill(empty, 0.0), experts)


@given(st.integers(0, 12), st.integers(1, 6), st.data())
@settings(max_examples=40, deadline=None)
def test_dense_round_trip_and_derived_views(num_rows: int, experts: int, data: st.DataObject) -> None:
    slots = data.draw(st.integers(0, experts))
    routing = random_routing(num_rows, slots, experts, data.draw(st.integers(0, 1000)))
    again = Routing.from_dense(routing.weights_TE, routing.mask_TE)
    assert torch.equal(again.weights_TE, routing.weights_TE)
    assert torch.equal(again.mask_TE, routing.mask_TE)
    assert again.slots == (int(routing.active_T.max()) if num_rows else 0)
    assert torch.equal(routing.load_E, routing.mask_TE.sum(0))
    assert torch.equal(routing.active_T, routing.mask_TE.sum(1))
    torch.testing.assert_close(routing.importance_E, routing.weights_TE.sum(0))


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_dispatch_lists_every_filled_slot_once_by_expert(num_rows: int, experts: int, seed: int) -> None:
    routing = random_routing(num_rows, min(2, experts), experts, seed)
    dispatch = routing.dispatch
    assert dispatch.counts == routing.load_E.tolist()
    expert_N = routing.expert_ids_TK.reshape(-1)[dispatch.slot_N]
    assert torch.equal(expert_N, expert_N.sort().values)
    expected = [
        (int(expert), row)
        for row, ids in enumerate(routing.expert_ids_TK.tolist())
        for expert in ids
        if expert < experts
    ]
    assert list(zip(expert_N.tolist(), dispatch.row_N.tolist(), strict=True)) == sorted(expected)


def test_slots_puts_values_back_and_zero_elsewhere() -> None:
    dispatch = Dispatch.of(torch.tensor([[2, 0], [3, 1], [3, 3]]), 3)
    assert dispatch.counts == [1, 1, 1]
    values = torch.tensor([[10.0], [11.0], [12.0]])
    assert dispatch.slots(values).reshape(-1).tolist() == [12.0, 10.0, 0.0, 11.0, 0.0, 0.0]


def test_from_dense_keeps_gradient_and_zero_weights_that_are_used() -> None:
    weights_TE = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], requires_grad=True)
    mask_TE = torch.tensor([[True, True, False], [False, False, True]])
    routing = Routing.from_dense(weights_TE, mask_TE)
    assert routing.expert_ids_TK.tolist() == [[0, 1], [2, 3]]
    assert routing.load_E.tolist() == [1, 1, 1]
    routing.weights_TE.sum().backward()
    assert weights_TE.grad is not None
    assert weights_TE.grad.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_padded_rows_are_emptied_by_from_dense_and_refused_elsewhere() -> None:
    real_T = torch.tensor([True, False])
    routing = Routing.from_dense(torch.ones(2, 2), token_mask_T=real_T)
    assert routing.expert_ids_TK.tolist() == [[0, 1], [2, 2]]
    with pytest.raises(ValueError, match="padded row"):
        Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2, token_mask_T=real_T)


@pytest.mark.case("C13")
@pytest.mark.parametrize("bad", [-1, 4, 7])
def test_ids_outside_the_experts_and_the_empty_slot_are_refused(bad: int) -> None:
    ids = torch.tensor([[0, 3], [bad, 1]])
    with pytest.raises(ValueError, match=rf"holds {bad} in row 1; allowed are 0..2 and 3"):
        Routing(ids, torch.zeros(2, 2), 3)


@pytest.mark.case("C13")
def test_an_empty_slot_must_not_weigh_and_weights_must_be_finite() -> None:
    ids = torch.tensor([[0, 3], [3, 1]])
    assert Routing(ids, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 3).load_E.tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="not 0 in an empty slot of row 1"):
        Routing(ids, torch.tensor([[1.0, 0.0], [0.5, 1.0]]), 3)
    with pytest.raises(ValueError, match="not finite in row 0"):
        Routing(ids, torch.tensor([[math.inf, 0.0], [0.0, 1.0]]), 3)
    with checks(False):
        Routing(ids, torch.tensor([[math.inf, 0.0], [0.0, 1.0]]), 3)


def test_shapes_and_kinds_are_always_checked() -> None:
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    bad: list[tuple[dict[str, object], str]] = [
        ({"expert_ids_TK": ids.int()}, "expert_ids_TK must be int64"),
        ({"expert_ids_TK": ids[0]}, "expert_ids_TK must be int64 of shape"),
        ({"weights_TK": weights.long()}, "weights_TK must be floating point"),
        ({"weights_TK": torch.ones(2, 2)}, r"of shape \(2, 1\)"),
        ({"logits_TE": torch.ones(2, 4)}, r"logits_TE must have shape \(2, 3\)"),
        ({"token_mask_T": torch.ones(2)}, "token_mask_T must be bool"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"score_function": "tanh"}, "score_function must be one of"),
    ]
    base = Routing(ids, weights, 3)
    with checks(False):
        for changes, message in bad:
            with pytest.raises(ValueError, match=message):
                base.replace(**changes)


def test_take_spreads_group_decisions_over_rows() -> None:
    routing = Routing(
        torch.tensor([[0], [1]]), torch.tensor([[0.25], [0.75]]), 2, torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    )
    spread = routing.take(torch.tensor([1, 0, 1]))
    assert spread.expert_ids_TK.tolist() == [[1], [0], [1]]
    assert spread.weights_TK.tolist() == [[0.75], [0.25], [0.75]]
    assert spread.load_E.tolist() == [1, 2]
    assert routing.load_E.tolist() == [1, 1]


def test_is_immutable_and_detaches() -> None:
    weight = torch.ones(2, 1, requires_grad=True)
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), weight, 2, losses={"z": weight.sum()})
    with pytest.raises(AttributeError):
        routing.num_experts = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        routing.losses["z"] = torch.zeros(())  # type: ignore[index]
    free = routing.detach()
    assert not free.weights_TK.requires_grad
    assert not free.losses["z"].requires_grad
    assert routing.losses["z"].requires_grad


def _with_logits(logits: Tensor, score: str, mask: Tensor | None = None) -> Routing:
    ids = torch.full((logits.shape[0], 0), 0, dtype=torch.int64)
    return Routing(ids, torch.zeros(ids.shape), logits.shape[1], logits, mask, score_function=score)


@pytest.mark.case("C08")
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "relu"])
def test_probabilities_sum_to_one_and_carry_finite_gradients(score: str) -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0], [-1.0, -2.0, -3.0], [200.0, -200.0, 0.0]], requires_grad=True)
    routing = _with_logits(logits, score)
    sums = routing.probs_TE.sum(1)
    expected = torch.ones(3)
    if score == "relu":
        expected[1] = 0.0  # a row without a positive logit
    torch.testing.assert_close(sums, expected)
    if score == "softmax":
        torch.testing.assert_close(routing.probs_TE, logits.softmax(1))
    ((routing.probs_TE * 100).square().sum() + routing.entropy).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_entropy_by_hand_and_without_padding() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)], [math.nan, 0.0]])
    routing = _with_logits(logits, "softmax", torch.tensor([True, True, False]))
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(routing.entropy_T, torch.tensor([math.log(2.0), quarter, 0.0]))
    torch.testing.assert_close(routing.entropy, torch.tensor((math.log(2.0) + quarter) / 2))
    with pytest.raises(ValueError, match="carries no logits_TE"):
        _ = random_routing(2, 1, 2, 0).probs_TE


@pytest.mark.case("C14")
@pytest.mark.parametrize(("num_rows", "slots"), [(0, 2), (3, 0), (0, 0)])
def test_no_rows_and_no_slots(num_rows: int, slots: int) -> None:
    ids = torch.zeros(num_rows, slots, dtype=torch.int64)
    routing = Routing(ids, torch.zeros(num_rows, slots), 4, torch.zeros(num_rows, 4))
    assert routing.load_E.tolist() == [0, 0, 0, 0]
    assert routing.importance_E.tolist() == [0.0] * 4
    assert routing.dispatch.counts == [0] * 4
    assert routing.weights_TE.shape == (num_rows, 4)
    assert torch.isfinite(routing.entropy)
    assert Routing.from_dense(routing.weights_TE).slots == 0


def test_loads_are_counted_in_deterministic_mode() -> None:
    routing = random_routing(50, 2, 4, 0)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        fresh = routing.replace()
        assert fresh.load_E.sum() == routing.filled_TK.sum()
        assert fresh.dispatch.counts == fresh.load_E.tolist()
    finally:
        torch.use_deterministic_algorithms(before)
