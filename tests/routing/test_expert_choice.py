"""Expert choice against its definition: capacity, groups, padding, and what it may know."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.layers import MoE
from moesaic.routing import Context, ExpertChoiceRouter, Routing
from tests.routing.helpers import MatrixBank, padded, rows


def by_definition(
    scores: list[list[float]], groups: list[int], real: list[bool], per_token: float
) -> set[tuple[int, int]]:
    experts = len(scores[0]) if scores else 0
    picked = set()
    for group in set(groups):
        members = [row for row in range(len(scores)) if groups[row] == group and real[row]]
        capacity = math.ceil(round(per_token * len(members) / experts, 9))
        for expert in range(experts):
            best = sorted(members, key=lambda row, e=expert: -scores[row][e])[:capacity]
            picked |= {(row, expert) for row in best}
    return picked


@given(
    count=st.integers(0, 25),
    experts=st.integers(1, 6),
    per_token=st.floats(0.1, 1.0),
    grouping=st.sampled_from(["sequence", "batch", "position"]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_picks_follow_the_definition(count: int, experts: int, per_token: float, grouping: str, seed: int) -> None:
    router = ExpertChoiceRouter(8, experts, per_token * experts, grouping=grouping).double()
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(-3, 3, (count,), generator=generator)
    real = torch.rand(count, generator=generator) < 0.8
    fields = {"sequence": {"group_T": names}, "position": {"position_T": names}, "batch": {}}[grouping]
    routing = router(rows(count, seed=seed, dtype=torch.float64), Context(token_mask_T=real, **fields))
    assert routing.logits_TE is not None
    groups = [0] * count if grouping == "batch" else names.tolist()
    expected = by_definition(routing.logits_TE.softmax(-1).tolist(), groups, real.tolist(), router.experts_per_token)
    assert {(row, expert) for row, expert in routing.mask_TE.nonzero().tolist()} == expected
    torch.testing.assert_close(routing.weights_TE, routing.logits_TE.softmax(-1) * routing.mask_TE)
    assert routing.extras["unrouted_rows"] == int(real.sum()) - len({row for row, _ in expected})


@pytest.mark.case("C03")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_picked_and_makes_no_capacity(side: str) -> None:
    router = ExpertChoiceRouter(8, 4, 1.0)
    layer = MoE(MatrixBank(8, 4), router)
    sequences = [rows(length, seed=length) for length in (3, 9, 30)]
    x, context = padded(sequences, side, 30, filler=5.0)
    y, routing = layer(x, context)
    real = context.token_mask_T
    assert real is not None
    alone = [layer(sequence, Context.from_mask(None, 1, len(sequence))) for sequence in sequences]
    torch.testing.assert_close(y[real], torch.cat([out for out, _ in alone]))
    assert torch.equal(routing.load_E, sum(one.load_E for _, one in alone))
    assert routing.load_E.tolist() == [math.ceil(3 / 4) + math.ceil(9 / 4) + math.ceil(30 / 4)] * 4
    assert y[~real].abs().max() == 0


@pytest.mark.case("C04")
def test_groupings_that_look_ahead_refuse_a_causal_model() -> None:
    for grouping in ("sequence", "batch"):
        with pytest.raises(ValueError, match=f"grouping='{grouping}'.*future.*grouping='position'.*allow_future=True"):
            ExpertChoiceRouter(8, 4, grouping=grouping).check_causal()
        ExpertChoiceRouter(8, 4, grouping=grouping, allow_future=True).check_causal()
    ExpertChoiceRouter(8, 4, grouping="position").check_causal()


@pytest.mark.case("C04")
@pytest.mark.parametrize("grouping", ["sequence", "batch", "position"])
def test_only_position_groups_ignore_later_tokens(grouping: str) -> None:
    torch.manual_seed(0)
    router = ExpertChoiceRouter(8, 4, 1.0, grouping=grouping)
    batch, length = 6, 16
    context = Context.from_mask(None, batch, length)
    x = rows(batch * length).view(batch, length, 8)
    changed = x.clone()
    changed[:, 10:] = rows(batch * 6, seed=1).view(batch, 6, 8) * 3
    before, after = (router(value.reshape(-1, 8), context).mask_TE.view(batch, length, 4) for value in (x, changed))
    same = torch.equal(before[:, :10], after[:, :10])
    assert same == (grouping == "position")


@pytest.mark.case("C04")
def test_position_groups_decide_a_decode_step_like_the_full_forward() -> None:
    router = ExpertChoiceRouter(8, 4, 1.0, grouping="position").eval()
    batch, length = 5, 7
    x = rows(batch * length).view(batch, length, 8)
    full = router(x.reshape(-1, 8), Context.from_mask(None, batch, length)).mask_TE.view(batch, length, 4)
    for step in range(length):
        position = torch.full((batch, 1), step)
        context = Context.from_mask(None, batch, 1, position_BS=position, phase="decode")
        assert torch.equal(router(x[:, step], context).mask_TE, full[:, step])


@pytest.mark.case("C05")
@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("training", [True, False])
def test_rows_that_no_expert_takes_are_empty_and_counted(count: int, training: bool) -> None:
    layer = MoE(MatrixBank(8, 4), ExpertChoiceRouter(8, 4, 0.25, grouping="batch")).train(training)
    assert isinstance(layer.router, ExpertChoiceRouter)
    with torch.no_grad():
        layer.router.weight_ED[2] += 3.0  # preferred by all
    x = rows(count).abs()
    y, routing = layer(x)
    capacity = math.ceil(0.25 * count / 4)
    assert routing.load_E.tolist() == [min(capacity, count)] * 4
    unrouted = routing.active_T == 0
    assert int(unrouted.sum()) == routing.extras["unrouted_rows"]
    assert y[unrouted].abs().sum() == 0
    for row in (~unrouted).nonzero().flatten().tolist()[:20]:  # a picked row's output depends on no other row
        one = layer.experts(x[row : row + 1], routing.take(torch.tensor([row])))
        torch.testing.assert_close(y[row : row + 1], one, rtol=1e-5, atol=1e-6)


@pytest.mark.case("C02")
def test_ties_go_to_the_earlier_row() -> None:
    router = ExpertChoiceRouter(8, 4, 1.0, grouping="batch")
    torch.nn.init.zeros_(router.weight_ED)
    routing = router(rows(257))
    assert routing.mask_TE[:65].all()
    assert not routing.mask_TE[65:].any()


def test_capacity_is_not_rounded_up_by_its_last_binary_digit() -> None:
    router = ExpertChoiceRouter(8, 10, 1.1, grouping="batch")
    assert router(rows(100)).load_E.tolist() == [11] * 10  # 1.1 * 100 / 10 = 11.000000000000002 in doubles


def test_forbidden_rows_use_no_capacity() -> None:
    router = ExpertChoiceRouter(8, 4, 2.0, grouping="batch")
    logits = rows(8, 4)
    allowed = torch.ones(8, 4, dtype=torch.bool)
    allowed[:3, 1] = False
    ids = router.choose(logits, Context(), allowed)
    routing: Routing = router.decide(logits, ids, Context())
    assert routing.load_E.tolist() == [4, 4, 4, 4]
    assert not (routing.mask_TE & ~allowed).any()


@pytest.mark.case("C14")
@pytest.mark.parametrize("grouping", ["sequence", "batch", "position"])
def test_no_rows_and_only_padding(grouping: str) -> None:
    layer = MoE(MatrixBank(8, 4), ExpertChoiceRouter(8, 4, grouping=grouping))
    y, routing = layer(rows(0), Context.from_mask(None, 0, 3))
    assert y.shape == (0, 8)
    assert routing.slots == 0
    y, routing = layer(rows(6), Context.from_mask(torch.zeros(2, 3, dtype=torch.bool), 2, 3))
    assert y.abs().sum() == 0
    assert routing.load_E.sum() == 0
    assert routing.extras["unrouted_rows"] == 0


def test_doors() -> None:
    for value in (0.0, 4.5, math.nan):
        with pytest.raises(ValueError, match="experts_per_token must lie in"):
            ExpertChoiceRouter(8, 4, value)
    with pytest.raises(ValueError, match="grouping must be one of"):
        ExpertChoiceRouter(8, 4, grouping="token")
    with pytest.raises(ValueError, match="ExpertChoiceRouter needs group_T"):
        ExpertChoiceRouter(8, 4)(rows(3))
    with pytest.raises(ValueError, match="ExpertChoiceRouter needs position_T"):
        ExpertChoiceRouter(8, 4, grouping="position")(rows(3))
