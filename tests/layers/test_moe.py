"""The MoE layer: composition, doors, interventions, padding, recomputation, and inside foreign models."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moesaic.experts import Experts, FFNExperts, SharedExpert, backend, dense_reference
from moesaic.experts.backends import BACKENDS
from moesaic.layers import BareMoE, MoE, collect_routings
from moesaic.layers.intervention import opened
from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Router, Routing, TopKRouter, end_step
from moesaic.routing.state import in_recompute

D, E = 6, 4


class MeanLoad(RoutingLoss):
    """A loss whose value and gradient are easy to read: the mean of the weights."""

    name = "mean_weight"

    def value(self, routing, context):
        context.check_rows(routing.num_rows, "MeanLoad")
        return routing.weights_TK.mean()


class GroupRouter(Router):
    """One decision a group: the experts that its mean row scores best."""

    per_group = True
    needs = ("group_T",)

    def __init__(self):
        super().__init__(D, E)
        self.weight = nn.Parameter(torch.randn(E, D))

    def forward(self, x_TD, context=None):
        context = self.check_input(x_TD, context)
        groups = int(context.group_T.max()) + 1
        mean_GD = torch.stack([x_TD[context.group_T == g].mean(0) for g in range(groups)])
        logits_GE = mean_GD @ self.weight.T
        return Routing(logits_GE.argmax(1, keepdim=True), logits_GE.max(1, keepdim=True).values, E, logits_GE)


class SelfRouting(FFNExperts):
    """A bank whose first hidden unit's key is the router; it does not think of padding."""

    def route(self, x_TD, context):
        logits_TE = x_TD @ self.up_EFD[:, 0].T
        return Routing(logits_TE.argmax(1, keepdim=True), torch.ones(x_TD.shape[0], 1), E, logits_TE)


class Force:
    """An intervention that notes what it saw and may change it."""

    def __init__(self, module, route=None, output=None):
        self.module, self._route, self._output, self.seen, self.out = module, route, output, [], []

    def handle_of(self, module):
        return "handle" if module is self.module else None

    def route(self, call):
        if not in_recompute():
            self.seen.append(call)
        return call.routing if self._route is None else self._route(call)

    def output(self, call, y_TO):
        if not in_recompute():
            self.out.append(y_TO)
        return y_TO if self._output is None else self._output(y_TO)


def layer(router=True, shared=False, losses=(), seed=0, **kwargs):
    torch.manual_seed(seed)
    return MoE(
        FFNExperts(D, 5, E, **kwargs),
        TopKRouter(D, E, 2) if router is True else router,
        SharedExpert(D, 5) if shared else None,
        losses,
    )


def rows(*shape, seed=1):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def only(expert):
    return lambda call: Routing(
        torch.full((call.routing.num_rows, 1), expert), torch.ones(call.routing.num_rows, 1), call.routing.num_experts
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 5), (2, 0), (0,)])
def test_routed_sum_plus_shared(shape, shared):
    moe, x = layer(shared=shared), rows(*shape)
    y, routing = moe(x)
    x_TD = x.reshape(-1, D)
    expected = dense_reference(moe.experts, x_TD, routing)
    if shared:
        expected = expected + moe.shared(x_TD)
    assert y.shape == x.shape
    assert routing.num_rows == x_TD.shape[0]
    torch.testing.assert_close(y.reshape(-1, D), expected, rtol=1e-5, atol=1e-6)


def test_width_out_may_differ():
    moe = MoE(FFNExperts(D, 5, E, out_dim=3), TopKRouter(D, E, 2), SharedExpert(D, 5, out_dim=3))
    assert moe(rows(2, 4))[0].shape == (2, 4, 3)


def test_losses_join_those_of_the_router_and_carry_gradient():
    moe = layer(losses=[MeanLoad(0.5)])
    _, routing = moe(rows(8))
    assert dict(routing.losses).keys() == {"mean_weight"}
    torch.testing.assert_close(routing.losses["mean_weight"], 0.5 * routing.weights_TK.mean())

    class Own(TopKRouter):
        def own_losses(self, routing):
            return {"own": routing.weights_TK.square().mean()}

    _, routing = MoE(FFNExperts(D, 5, E), Own(D, E, 2), losses=[MeanLoad(1.0)])(rows(8))
    assert set(routing.losses) == {"own", "mean_weight"}
    assert torch.autograd.grad(sum(routing.losses.values()), routing.logits_TE)[0].any()

    class Clash(Own):
        def own_losses(self, routing):
            return {"mean_weight": routing.weights_TK.mean()}

    with pytest.raises(ValueError, match="already adds a loss called 'mean_weight'"):
        MoE(FFNExperts(D, 5, E), Clash(D, E, 2), losses=[MeanLoad(1.0)])(rows(8))


@pytest.mark.case("C14")
def test_no_rows_through_the_whole_layer():
    moe = layer(shared=True, losses=[])
    y, routing = moe(rows(0))
    (y.sum() + routing.weights_TK.sum()).backward()
    assert y.shape == (0, D)
    assert all(not p.grad.any() for p in moe.experts.parameters())
    end_step(moe)


def test_a_group_shares_its_decision_and_losses_count_decisions():
    torch.manual_seed(0)
    moe = MoE(FFNExperts(D, 5, E), GroupRouter(), losses=[MeanLoad(1.0)])
    group_T = torch.tensor([0, 0, 1, 1, 1])
    mask_T = torch.tensor([True, True, True, True, False])
    spy = Force(moe)
    with opened(spy):
        y, decision = moe(rows(5), Context(group_T=group_T, token_mask_T=mask_T))
    assert decision.num_rows == 2
    torch.testing.assert_close(decision.losses["mean_weight"], decision.weights_TK.mean())
    (call,) = spy.seen
    assert call.routing.expert_ids_TK[:4, 0].tolist() == decision.expert_ids_TK[group_T[:4], 0].tolist()
    assert call.routing.expert_ids_TK[4].tolist() == [E]  # padding inside a real group
    assert not y[4].any()
    with pytest.raises(ValueError, match="decides per group"):
        call.choose(ids_TK=torch.zeros(5, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="group_T"):
        moe(rows(5))
    with opened(Force(moe, only(1))):
        _, used = moe(rows(5), Context(group_T=group_T, token_mask_T=mask_T))
    assert used.load_E.tolist() == [0, 4, 0, 0]  # the override's, one row a token, padding out


def test_a_bank_that_routes_itself():
    moe = MoE(SelfRouting(D, 5, E))
    mask_T = torch.tensor([True, False, True])
    spy = Force(moe)
    with opened(spy):
        y, routing = moe(rows(3), Context(token_mask_T=mask_T))
    assert routing.load_E.sum() == 2
    assert not y[1].any()
    assert spy.seen[0].router is None
    with pytest.raises(ValueError, match="SelfRouting cannot weigh another choice"):
        spy.seen[0].choose(ids_TK=torch.zeros(3, 1, dtype=torch.int64))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.case("C13")
def test_padded_rows_may_hold_anything(name):
    moe, x = layer(), rows(6)
    mask_T = torch.tensor([True, True, False, True, False, True])
    with backend(name):
        alone, _ = moe(x[mask_T])
        x = x.clone()
        x[~mask_T] = float("nan")
        y, routing = moe(x, Context(token_mask_T=mask_T))
    torch.testing.assert_close(y[mask_T], alone)
    assert not y[~mask_T].any()
    assert routing.load_E.sum() == 2 * 4


def test_identity_intervention_is_bit_equal_and_overrides_are_obeyed():
    moe, x = layer(shared=True), rows(7)
    y, _ = moe(x)
    with opened(Force(moe)):
        assert torch.equal(moe(x)[0], y)
    with opened(Force(moe, only(2))):
        forced, routing = moe(x)
    assert routing.load_E.tolist() == [0, 0, 7, 0]
    expert = moe.experts.rows(x, [0, 0, 7, 0], Context())
    torch.testing.assert_close(forced, expert + moe.shared(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(moe(x)[0], y)


def test_overrides_nest_inner_first_and_the_outer_sees_the_inner_ones_choice():
    moe, x = layer(), rows(3)
    order = []

    def note(name, expert):
        def route(call):
            order.append((name, call.routing.expert_ids_TK[0].tolist()))
            return only(expert)(call)

        return route

    outer = Force(moe, note("outer", 0), output=lambda y: y + 1)
    inner = Force(moe, note("inner", 3), output=lambda y: y * 2)
    own = moe(x)[1].expert_ids_TK[0].tolist()
    with opened(outer), opened(inner):
        y, routing = moe(x)
    assert order == [("inner", own), ("outer", [3])]
    assert routing.load_E.tolist() == [3, 0, 0, 0]
    torch.testing.assert_close(y, moe.experts.rows(x, [3, 0, 0, 0], Context()) * 2 + 1, rtol=1e-5, atol=1e-6)


def test_choose_weighs_by_the_routers_own_rule():
    moe, x = layer(), rows(5)
    with opened(spy := Force(moe)):
        _, routing = moe(x)
    call = spy.seen[0]
    again = call.choose(ids_TK=routing.expert_ids_TK)
    assert torch.equal(again.weights_TK, routing.weights_TK)
    allowed = call.choose(allowed_TE=torch.tensor([True, False, True, False]))
    assert set(allowed.expert_ids_TK.unique().tolist()) == {0, 2}
    torch.testing.assert_close(allowed.weights_TK.sum(1), torch.ones(5))
    with pytest.raises(ValueError, match="exactly one of ids_TK and allowed_TE"):
        call.choose()
    with pytest.raises(ValueError, match=r"ids_TK must be int64 of shape \(5, K\)"):
        call.choose(ids_TK=torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="allowed_TE must be bool"):
        call.choose(allowed_TE=torch.ones(5, 3, dtype=torch.bool))


def test_an_override_cannot_fill_padded_rows():
    moe, mask_T = layer(losses=[MeanLoad(1.0)]), torch.tensor([True, False, True])
    with opened(outer := Force(moe)), opened(Force(moe, only(1))):
        y, routing = moe(rows(3), Context(token_mask_T=mask_T))
    assert routing.load_E.tolist() == [0, 2, 0, 0]
    assert outer.seen[0].routing.load_E.tolist() == [0, 2, 0, 0]
    assert not y[1].any()


def test_bad_overrides_are_refused_and_leave_nothing_open():
    moe, x = layer(), rows(3)
    y, _ = moe(x)
    few = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), E)
    many = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), E + 1)
    for bad, error, message in (
        ((), TypeError, "must return a Routing, got tuple"),
        (few, ValueError, "2 rows over 4 experts"),
        (many, ValueError, "3 rows over 5 experts"),
    ):
        with pytest.raises(error, match=message), opened(Force(moe, lambda call, bad=bad: bad)):
            moe(x)
    assert torch.equal(moe(x)[0], y)


@pytest.mark.case("C02")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_and_reports_once(name, reentrant):
    # A zero router ties every expert in every row.
    moe, x = layer(shared=True), rows(257)
    nn.init.zeros_(moe.router.weight_ED)
    results = []
    for recompute in (False, True):
        twin = copy.deepcopy(moe)
        leaf = x.clone().requires_grad_()
        with backend(name), opened(spy := Force(twin)):
            for _ in range(2):
                run = lambda value, twin=twin: twin(value)[0]  # noqa: E731
                y = checkpoint(run, leaf, use_reentrant=reentrant) if recompute else run(leaf)
                y.square().sum().backward()
        assert len(spy.seen) == len(spy.out) == 2
        ids_TK = spy.seen[-1].routing.expert_ids_TK
        results.append([ids_TK, y, leaf.grad, *(p.grad for p in twin.parameters())])
    assert results[0][0].tolist() == [[0, 1]] * 257
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.case("C02")
def test_an_override_holds_in_recomputation():
    moe, x = layer(), rows(9).requires_grad_()
    with opened(Force(moe, only(3))):
        checkpoint(lambda value: moe(value)[0], x, use_reentrant=False).sum().backward()
    assert moe.experts.up_EFD.grad[3].any()
    assert not moe.experts.up_EFD.grad[:3].any()


@pytest.mark.case("C16")
@pytest.mark.parametrize("name", BACKENDS)
def test_every_expert_that_received_rows_moves(name):
    moe, x = layer(shared=True), rows(64)
    start = moe.experts.up_EFD.detach().clone()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    received = torch.zeros(E, dtype=torch.bool)
    for _ in range(5):
        with backend(name):
            y, routing = moe(x)
        optimizer.zero_grad()
        (y - 1).square().mean().backward()
        optimizer.step()
        end_step(moe)
        received |= routing.load_E > 0
    moved = (moe.experts.up_EFD != start).flatten(1).any(1)
    assert moved.tolist() == received.tolist()
    assert moe.router.weight_ED.grad.any()


def test_bf16_layer_routes_in_float32():
    moe, x = layer(shared=True), rows(33)
    ids_TK = moe(x.bfloat16().float())[1].expert_ids_TK
    y, routing = copy.deepcopy(moe).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.expert_ids_TK, ids_TK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = moe(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(routing.expert_ids_TK, moe(x)[1].expert_ids_TK)


class Foreign(nn.Module):
    """Somebody else's block, which wants tensors."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return x + self.second(x + checkpoint(self.first, x, use_reentrant=False))


def test_inside_a_foreign_model():
    first, second = layer(losses=[MeanLoad(1.0)]), layer(losses=[MeanLoad(2.0)], seed=1)
    model, x = Foreign(BareMoE(first), BareMoE(second)), rows(2, 5)
    with collect_routings() as collected, opened(spy := Force(second)):
        y = model(x)
        (y.sum() + collected.total_loss()).backward()
    assert y.shape == x.shape
    assert [routing.num_rows for routing in collected.routings] == [10, 10]  # the recomputed pass is not counted
    assert len(spy.seen) == 1
    torch.testing.assert_close(
        collected.losses()["mean_weight"], sum(routing.losses["mean_weight"] for routing in collected.routings)
    )
    assert torch.equal(model(x), y)  # nobody listens: nothing is kept
    assert len(collected.routings) == 2
    mask_T = torch.tensor([True] * 8 + [False] * 2)
    with collect_routings(Context(token_mask_T=mask_T)) as collected:
        model(x)
    assert [int(routing.load_E.sum()) for routing in collected.routings] == [16, 16]
    with collect_routings() as collected:
        pass
    assert collected.total_loss() == 0


def test_doors():
    bank = FFNExperts(D, 5, E)
    with pytest.raises(ValueError, match="router is None and FFNExperts does not route itself"):
        MoE(bank)
    with pytest.raises(ValueError, match="chooses among 5 experts, the bank has 4"):
        MoE(bank, TopKRouter(D, 5, 2))
    with pytest.raises(ValueError, match="router works in width 7, the bank in 6"):
        MoE(bank, TopKRouter(7, E, 2))
    with pytest.raises(ValueError, match="different names"):
        MoE(bank, TopKRouter(D, E, 2), losses=[MeanLoad(1.0), MeanLoad(2.0)])
    moe = MoE(bank, TopKRouter(D, E, 2))
    for bad in (torch.zeros(3, 5), torch.zeros(())):
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 6\)"):
            moe(bad)
    with pytest.raises(ValueError, match="3 rows and a context for 2"):
        moe(rows(3), Context(token_mask_T=torch.ones(2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="scores are not finite"):
        moe(rows(3) * float("nan"))


def test_a_bank_may_need_something_beside_the_token():
    class Conditioned(Experts):
        needs = ("condition:text",)

        def rows(self, x_ND, counts, context):
            return x_ND * context.condition["text"]

    moe = MoE(Conditioned(D, E), TopKRouter(D, E, 2))
    with pytest.raises(ValueError, match="condition:text"):
        moe(rows(3))
    y, _ = moe(rows(3), Context(condition={"text": torch.tensor(2.0)}))
    torch.testing.assert_close(y, 2 * rows(3))
