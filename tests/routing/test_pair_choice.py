"""Pair choice against its definition: budgets, groups, padding, scores, and what a row may know."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.layers import MoE
from moesaic.routing import Context, PairChoiceRouter, Routing, TopKRouter, end_step, unified_score
from tests.routing.helpers import MatrixBank, padded, rows

GROUPINGS = ["sequence", "batch", "position", "token", "causal"]
D, E = 8, 4


def logits(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def choice(router: PairChoiceRouter, logits_TE: Tensor, context: Context | None = None) -> Routing:
    context = Context() if context is None else context
    return router.decide(logits_TE, router.choose(logits_TE, context), context)


# Scores --------------------------------------------------------------------------------------------------------------
@pytest.mark.spec("usmoe", "6.2")
def test_scores_at_zero_logits_and_at_both_ends() -> None:
    for rate in (0.0, 0.3, 0.5, 1.0):
        torch.testing.assert_close(unified_score(torch.zeros(3, 5), rate), torch.full((3, 5), 0.2), atol=1e-7, rtol=0)
    some = rows(6, 5, dtype=torch.float64)
    torch.testing.assert_close(unified_score(some, 0.0), some.softmax(-1))
    torch.testing.assert_close(unified_score(some, 1.0), 2 * some.sigmoid() / 5)


@pytest.mark.spec("usmoe", "6.3")
def test_scores_of_the_worked_example() -> None:
    example = logits([2, 0, 0, 0])
    softmax = logits([0.711235, 0.096255, 0.096255, 0.096255])
    torch.testing.assert_close(unified_score(example, 0.0), softmax, atol=1e-6, rtol=0)
    torch.testing.assert_close(unified_score(example, 1.0), logits([0.440399, 0.25, 0.25, 0.25]), atol=1e-6, rtol=0)
    mixed = logits([0.575817, 0.173128, 0.173128, 0.173128])
    torch.testing.assert_close(unified_score(example, 0.5), mixed, atol=1e-6, rtol=0)


def test_the_softmax_over_rows_stays_inside_its_group_and_leaves_padding_out() -> None:
    some = rows(7, 3, dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1, 1, 0, 2])
    mask = torch.tensor([True, True, True, False, True, True, False])
    found = unified_score(some, 1.0, "token_softmax", group_T=group, token_mask_T=mask)
    for name in (0, 1):
        members = (group == name) & mask
        torch.testing.assert_close(found[members], some[members].softmax(0))
    assert found[~mask].abs().sum() == 0
    torch.testing.assert_close(unified_score(some, 1.0, "token_softmax"), some.softmax(0))
    large = unified_score(some * 400, 0.5, "token_softmax", group_T=group)
    assert torch.isfinite(large).all()


def test_scores_are_differentiable() -> None:
    some = rows(5, 3, dtype=torch.float64).requires_grad_()
    group = torch.tensor([0, 1, 0, 1, 1])
    assert torch.autograd.gradcheck(lambda a: unified_score(a, 0.4), some)
    assert torch.autograd.gradcheck(lambda a: unified_score(a, 0.4, "token_softmax", group_T=group), some)


# Selection -----------------------------------------------------------------------------------------------------------
def by_definition(scores: list[list[float]], groups: list[int], real: list[bool], k: float) -> set[tuple[int, int]]:
    picked = set()
    for group in set(groups):
        members = [row for row in range(len(scores)) if groups[row] == group and real[row]]
        pairs = [(row, expert) for row in members for expert in range(len(scores[row]))]
        budget = max(1, math.floor(round(k * len(members), 9)))
        picked |= set(sorted(pairs, key=lambda pair: (-scores[pair[0]][pair[1]], pair))[:budget])
    return picked


@pytest.mark.spec("usmoe", "6.4")
@given(
    count=st.integers(0, 20),
    experts=st.integers(1, 5),
    share=st.floats(0.05, 1.0),
    grouping=st.sampled_from(["sequence", "batch", "position", "token"]),
    side=st.sampled_from(["sigmoid", "token_softmax"]),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_the_mask_holds_exactly_the_best_pairs_of_each_budget(
    count: int, experts: int, share: float, grouping: str, side: str, ties: bool, seed: int
) -> None:
    k = share * experts
    router = PairChoiceRouter(D, experts, k, grouping=grouping, expert_side=side).double()
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(-2, 3, (count,), generator=generator)
    real = torch.rand(count, generator=generator) < 0.8
    fields = {"sequence": {"group_T": names}, "position": {"position_T": names}}.get(grouping, {})
    context = Context(token_mask_T=real, **fields)
    x = torch.ones(count, D, dtype=torch.float64) if ties else rows(count, seed=seed, dtype=torch.float64)
    routing = router(x, context)
    scores = router.scores(routing.logits_TE, context)
    groups = list(range(count)) if grouping == "token" else [0] * count if grouping == "batch" else names.tolist()
    expected = by_definition(scores.tolist(), groups, real.tolist(), k)
    assert {(row, expert) for row, expert in routing.mask_TE.nonzero().tolist()} == expected
    torch.testing.assert_close(routing.weights_TE, scores * routing.mask_TE)
    assert routing.extras["unrouted_rows"] == int(real.sum()) - len({row for row, _ in expected})


@pytest.mark.spec("usmoe", "6.4")
def test_a_budget_that_is_whole_on_paper_is_not_rounded_down() -> None:
    assert choice(PairChoiceRouter(D, E, 1.1, grouping="batch"), rows(10, E)).load_E.sum() == 11
    assert choice(PairChoiceRouter(D, E, 0.01, grouping="batch"), rows(10, E)).load_E.sum() == 1


@pytest.mark.case("C03")
@pytest.mark.spec("usmoe", "6.4")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("expert_side", ["sigmoid", "token_softmax"])
def test_padding_is_never_chosen_and_makes_no_budget(side: str, expert_side: str) -> None:
    layer = MoE(MatrixBank(D, E), PairChoiceRouter(D, E, 1.5, expert_side=expert_side))
    sequences = [rows(length, seed=length) for length in (3, 9, 30)]
    x, context = padded(sequences, side, 30, filler=5.0)
    y, routing = layer(x, context)
    real = context.token_mask_T
    assert real is not None
    alone = [layer(sequence, Context.from_mask(None, 1, len(sequence))) for sequence in sequences]
    torch.testing.assert_close(y[real], torch.cat([out for out, _ in alone]))
    assert routing.load_E.sum() == 4 + 13 + 45
    assert y[~real].abs().max() == 0


@pytest.mark.case("C02")
@pytest.mark.spec("usmoe", "6.4")
def test_ties_go_to_the_earlier_row_then_to_the_lower_expert() -> None:
    routing = choice(PairChoiceRouter(D, E, 1.5, grouping="batch"), torch.zeros(257, E))
    flat = routing.mask_TE.flatten()
    assert flat[:385].all()
    assert not flat[385:].any()


@pytest.mark.spec("usmoe", "6.6")
def test_alone_in_its_group_a_row_takes_its_top_k_and_the_whole_budget_is_dense() -> None:
    torch.manual_seed(0)
    pair, top = PairChoiceRouter(D, E, 2, rate=0.0, grouping="token"), TopKRouter(D, E, 2, renormalize=False)
    top.load_state_dict(pair.state_dict())
    x = rows(50)
    assert torch.equal(pair(x).mask_TE, top(x).mask_TE)
    assert torch.equal(pair(x).weights_TE, top(x).weights_TE)
    layer = MoE(MatrixBank(D, E), PairChoiceRouter(D, E, E, grouping="batch"))
    y, routing = layer(x)
    assert isinstance(layer.experts, MatrixBank)
    dense = torch.einsum("td,eod,te->to", x, layer.experts.weight_EDD, unified_score(routing.logits_TE))
    torch.testing.assert_close(y, dense)


@pytest.mark.spec("usmoe", "6.7")
@given(seed=st.integers(0, 1000), shift=st.floats(0.01, 5.0))
def test_permutations_and_a_shift_of_one_row(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    some = torch.randn(9, E, generator=generator, dtype=torch.float64)
    router = PairChoiceRouter(D, E, 1.5, grouping="batch").double()
    mask = choice(router, some).mask_TE
    row_order, expert_order = torch.randperm(9, generator=generator), torch.randperm(E, generator=generator)
    assert torch.equal(choice(router, some[row_order]).mask_TE, mask[row_order])
    assert torch.equal(choice(router, some[:, expert_order]).mask_TE, mask[:, expert_order])
    higher = some.clone()
    higher[4] += shift
    torch.testing.assert_close(unified_score(higher, 0.0), unified_score(some, 0.0))
    assert bool((unified_score(higher, 1.0)[4] > unified_score(some, 1.0)[4]).all())
    assert choice(router, higher).active_T[4] >= choice(router, some).active_T[4]


@pytest.mark.case("C05")
@pytest.mark.spec("usmoe", "6.8")
@pytest.mark.parametrize("normalize", ["none", "all", "selected"])
def test_a_row_without_experts_gets_zero_and_the_gate_learns_from_kept_pairs_only(normalize: str) -> None:
    router = PairChoiceRouter(D, E, 0.5, grouping="batch", normalize=normalize)
    layer = MoE(MatrixBank(D, E), router)
    x = rows(20).requires_grad_()
    y, routing = layer(x)
    empty = routing.active_T == 0
    assert 0 < int(empty.sum()) == routing.extras["unrouted_rows"]
    assert y[empty].abs().sum() == 0
    given_logits = routing.logits_TE
    assert given_logits is not None
    (grad,) = torch.autograd.grad(y.square().sum(), given_logits, retain_graph=True)
    assert grad[empty].abs().sum() == 0
    if normalize != "selected":  # where every chosen row has one expert its weight is constant
        assert (grad[~empty].abs().sum(1) > 0).all()
    y.square().sum().backward()
    assert router.weight_ED.grad is not None and x.grad is not None
    assert torch.isfinite(router.weight_ED.grad).all() and torch.isfinite(x.grad).all()
    assert x.grad[empty].abs().sum() == 0


def test_normalised_weights() -> None:
    some = rows(12, E)
    raw, whole, chosen = (
        choice(PairChoiceRouter(D, E, 1.5, grouping="batch", normalize=how), some)
        for how in ("none", "all", "selected")
    )
    scores = unified_score(some)
    torch.testing.assert_close(raw.weights_TE, scores * raw.mask_TE)
    torch.testing.assert_close(whole.weights_TE, scores / scores.sum(1, keepdim=True) * raw.mask_TE)
    used = raw.active_T > 0
    torch.testing.assert_close(chosen.weights_TE[used].sum(1), torch.ones(int(used.sum())))


def test_forbidden_pairs_are_replaced_by_the_next_best() -> None:
    router = PairChoiceRouter(D, E, 2.0, grouping="batch")
    some = rows(8, E)
    allowed = torch.ones(8, E, dtype=torch.bool)
    allowed[:3, 1] = False
    routing = router.decide(some, router.choose(some, Context(), allowed), Context())
    assert routing.load_E.sum() == 16
    assert not (routing.mask_TE & ~allowed).any()
    none = router.choose(some, Context(), torch.zeros_like(allowed))
    assert none.shape == (8, 0)


# What a row may know -------------------------------------------------------------------------------------------------
@pytest.mark.case("C04")
@pytest.mark.spec("usmoe", "6.9")
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_only_budgets_over_later_rows_leak(grouping: str) -> None:
    torch.manual_seed(0)
    router = PairChoiceRouter(D, E, 1.5, grouping=grouping)
    batch, length = 6, 16
    context = Context.from_mask(None, batch, length)
    x = rows(batch * length).view(batch, length, D)
    changed = x.clone()
    changed[:, -1] = rows(batch, seed=1) * 4
    before, after = (router(value.reshape(-1, D), context).mask_TE.view(batch, length, E) for value in (x, changed))
    assert not torch.equal(before[:, -1], after[:, -1])
    assert torch.equal(before[:, :-1], after[:, :-1]) == (grouping not in ("sequence", "batch"))


@pytest.mark.case("C04")
@pytest.mark.spec("usmoe", "6.9")
@pytest.mark.parametrize("grouping", ["position", "token", "causal"])
def test_token_by_token_it_decides_like_the_full_forward(grouping: str) -> None:
    router = PairChoiceRouter(D, E, 1.5, grouping=grouping).eval()
    batch, length = 5, 7
    x = rows(batch * length).view(batch, length, D)
    full = router(x.reshape(-1, D), Context.from_mask(None, batch, length)).mask_TE.view(batch, length, E)
    for step in range(length):
        position = torch.full((batch, 1), step)
        context = Context.from_mask(None, batch, 1, position_BS=position, phase="decode")
        assert torch.equal(router(x[:, step], context).mask_TE, full[:, step])


@pytest.mark.case("C04")
def test_budgets_that_look_ahead_refuse_a_causal_model() -> None:
    for grouping in ("sequence", "batch"):
        with pytest.raises(ValueError, match=f"grouping='{grouping}'.*future.*grouping='causal'.*allow_future=True"):
            PairChoiceRouter(D, E, grouping=grouping).check_causal()
        PairChoiceRouter(D, E, grouping=grouping, allow_future=True).check_causal()
    for grouping in ("position", "token", "causal"):
        PairChoiceRouter(D, E, grouping=grouping).check_causal()


# The running threshold -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("k", "experts"), [(1.0, 4), (2.0, 8), (1.5, 16)])
def test_the_threshold_starts_and_stays_at_the_budget(k: float, experts: int) -> None:
    torch.manual_seed(0)
    router = PairChoiceRouter(32, experts, k, grouping="causal")
    x = rows(4000, 32)
    context = Context.from_mask(None, 20, 200)
    assert router.eval()(x, context).active_T.double().mean() == pytest.approx(k, rel=0.15)
    with torch.no_grad():
        router.weight_ED.mul_(3.0).add_(0.2)  # no longer standard normal
    router.train()
    for _ in range(3):
        router(x, context)
        end_step(router)
    assert router.eval()(x, context).active_T.double().mean() == pytest.approx(k, rel=0.03)


def test_the_threshold_is_the_moving_average_of_the_groups_budget_scores() -> None:
    router = PairChoiceRouter(D, E, 1.5, grouping="causal", decay=0.75).train()
    threshold = None
    for step in range(3):
        x = rows(24, seed=step)
        routing = router(x, Context.from_mask(None, 2, 12))
        scores = unified_score(routing.logits_TE.detach()).view(2, -1).sort(descending=True).values
        mean = float(scores[:, 17].double().mean())  # B = 1.5 * 12 = 18
        threshold = mean if threshold is None else 0.75 * threshold + 0.25 * mean
        end_step(router)
        assert float(router.threshold) == pytest.approx(threshold, rel=1e-6)
    unchanged = float(router.threshold)
    end_step(router)  # a step without a forward
    router.eval()(rows(24), Context())
    end_step(router)
    assert float(router.threshold) == unchanged


@pytest.mark.case("C11")
def test_micro_batches_recomputation_and_padding_move_the_threshold_alike() -> None:
    torch.manual_seed(0)
    whole = PairChoiceRouter(D, E, 1.5, grouping="causal")
    split, again, wide = (PairChoiceRouter(D, E, 1.5, grouping="causal") for _ in range(3))
    for other in (split, again, wide):
        other.load_state_dict(whole.state_dict())
    sequences = [rows(10, seed=seed) for seed in range(4)]
    x = torch.cat(sequences)
    whole(x, Context.from_mask(None, 4, 10))
    for part in (x[:20], x[20:]):
        split(part, Context.from_mask(None, 2, 10))
    layer = MoE(MatrixBank(D, E), again)

    def run(value: Tensor) -> Tensor:
        return layer(value, Context.from_mask(None, 4, 10))[0]

    checkpoint(run, x.clone().requires_grad_(), use_reentrant=False).sum().backward()
    wide(*padded(sequences, "left", 16, filler=9.0))
    for router in (whole, split, again, wide):
        end_step(router)
    assert float(split.threshold) == float(again.threshold) == float(wide.threshold) == float(whole.threshold)


@pytest.mark.case("C12")
def test_the_threshold_keeps_float32_and_is_saved() -> None:
    router = PairChoiceRouter(D, E, 1.5, grouping="causal").to(torch.bfloat16)
    assert router.threshold.dtype == torch.float32
    router.train()(rows(30))
    end_step(router)
    other = PairChoiceRouter(D, E, 1.5, grouping="causal")
    other.load_state_dict(router.state_dict())
    assert float(other.threshold) == float(router.threshold)
    assert int(other.threshold_steps) == 1
    assert "threshold" not in PairChoiceRouter(D, E).state_dict()


# Doors ---------------------------------------------------------------------------------------------------------------
@pytest.mark.case("C14")
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_no_rows_and_only_padding(grouping: str) -> None:
    layer = MoE(MatrixBank(D, E), PairChoiceRouter(D, E, grouping=grouping)).train()
    y, routing = layer(rows(0), Context.from_mask(None, 0, 3))
    assert y.shape == (0, D)
    assert routing.slots == 0
    y, routing = layer(rows(6), Context.from_mask(torch.zeros(2, 3, dtype=torch.bool), 2, 3))
    assert y.abs().sum() == 0
    assert routing.load_E.sum() == 0
    assert routing.extras["unrouted_rows"] == 0
    end_step(layer)
    assert all(torch.isfinite(value).all() for value in layer.state_dict().values())


def test_doors() -> None:
    for value in (0.0, -1.0, 4.5, math.nan):
        with pytest.raises(ValueError, match="experts_per_token must lie in"):
            PairChoiceRouter(D, E, value)
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="rate must lie in"):
            PairChoiceRouter(D, E, rate=value)
        with pytest.raises(ValueError, match="rate must lie in"):
            unified_score(torch.zeros(2, 2), value)
    for name in ("grouping", "normalize", "expert_side"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            PairChoiceRouter(D, E, **{name: "nothing"})
    with pytest.raises(ValueError, match="decay must lie in"):
        PairChoiceRouter(D, E, grouping="causal", decay=1.0)
    with pytest.raises(ValueError, match="compares a row with later ones"):
        PairChoiceRouter(D, E, grouping="causal", expert_side="token_softmax")
    with pytest.raises(ValueError, match="PairChoiceRouter needs group_T"):
        PairChoiceRouter(D, E)(rows(3))
    with pytest.raises(ValueError, match="PairChoiceRouter needs position_T"):
        PairChoiceRouter(D, E, grouping="position")(rows(3))
    with pytest.raises(ValueError, match="not finite"):
        unified_score(torch.tensor([[math.nan, 0.0]]))
    with pytest.raises(ValueError, match="not finite in layer"):
        PairChoiceRouter(D, E, grouping="batch")(torch.full((2, D), math.inf))
    with pytest.raises(ValueError, match="expert_side must be one of"):
        unified_score(torch.zeros(2, 2), 0.5, "row")
    with pytest.raises(ValueError, match="group_T must have shape"):
        unified_score(torch.zeros(2, 2), group_T=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must have shape"):
        unified_score(torch.zeros(2))
