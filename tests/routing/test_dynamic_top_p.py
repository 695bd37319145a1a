import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.experts import dense_reference
from moesaic.experts.ffn import FFNExperts
from moesaic.layers import MoE
from moesaic.routing import (
    Context,
    DynamicTopPRouter,
    PIThresholdController,
    Routing,
    TopPRouter,
    end_step,
    normalize_router_logits,
    share_controllers,
    top_p_select,
)
from moesaic.routing.threshold_controller import default_threshold

D, E = 12, 8


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def router(seed: int = 0, target: float = 3.0, **options) -> DynamicTopPRouter:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    return DynamicTopPRouter(D, E, target, **options)


PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


@pytest.mark.spec("dtop-p", "6.1")
@pytest.mark.parametrize(("p", "count"), [(0.5, 1), (0.51, 2), (0.79, 2), (0.96, 4), (1.0, 4)])
def test_hand_examples(p: float, count: int) -> None:
    mask, weights = top_p_select(PROBS, p)
    assert mask.tolist() == [[index < count for index in range(4)]]
    if p == 0.79:
        torch.testing.assert_close(weights, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))


@pytest.mark.spec("dtop-p", "6.1")
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.floats(-8, 8, width=32), min_size=5, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
def test_the_set_is_the_smallest_that_reaches_p_and_grows_with_it(logits, p: float, q: float) -> None:  # type: ignore[no-untyped-def]
    probs = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    p, q = min(p, q), max(p, q)
    mask, weights = top_p_select(probs, p)
    mass = (probs * mask).sum(-1)
    smallest = probs.masked_fill(~mask, math.inf).min(-1).values
    assert bool((mass >= p - 1e-12).all())
    if p < 1:
        assert bool((mass - smallest < p + 1e-12).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(logits), dtype=torch.float64))
    assert bool((top_p_select(probs, q)[0].sum(-1) >= mask.sum(-1)).all())


@pytest.mark.spec("dtop-p", "6.2")
def test_one_hot_and_uniform_probabilities() -> None:
    one_hot, uniform = torch.eye(4), torch.full((1, 10), 0.1)
    for p in (0.01, 0.3, 0.77, 0.999):
        assert top_p_select(one_hot, p)[0].sum(-1).tolist() == [1] * 4
        assert int(top_p_select(uniform, p)[0].sum()) == math.ceil(p * 10)
    mask, _ = top_p_select(uniform, 0.35)
    assert mask.tolist() == [[True] * 4 + [False] * 6]  # ties go to the lower index


def plant(controller: PIThresholdController, steps: int) -> list[float]:
    """Mean active experts over time where a = p E."""
    active = []
    for _ in range(steps + 1):
        active.append(controller.p * controller.num_experts)
        controller.update(active[-1])
    return active


@pytest.mark.spec("dtop-p", "6.3")
def test_the_controller_on_a_linear_plant() -> None:
    controller = PIThresholdController(4, 16, kp=0.1, ki=0.1, p0=0.9)
    assert controller.update(14.4) == pytest.approx(0.77)
    assert controller.error_sum == pytest.approx(-0.65)
    active = plant(PIThresholdController(4, 16, kp=0.1, ki=0.1, p0=0.9), 100)
    assert active[0] == pytest.approx(14.4)
    assert active[1] == pytest.approx(12.32)
    assert active[20] == pytest.approx(5.40, abs=0.005)
    assert active[40] == pytest.approx(4.21, abs=0.005)
    assert abs(active[100] - 4) < 0.01
    assert plant(PIThresholdController(4, 16, kp=0.1, ki=0.02, p0=0.9), 100)[100] == pytest.approx(5.51, abs=0.005)
    wild = plant(PIThresholdController(4, 16, kp=0.1, ki=2.2, p0=0.9), 400)
    assert max(abs(a - 4) for a in wild[-20:]) > 0.5
    still = PIThresholdController(4, 16, p0=0.3)
    assert [still.update(4.0) for _ in range(5)] == [0.3] * 5


@pytest.mark.spec("dtop-p", "6.4")
@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(0, 16), min_size=1, max_size=40), st.floats(0.05, 0.95))
def test_p_stays_in_its_range_and_moves_against_the_error(active: list[float], p0: float) -> None:
    controller = PIThresholdController(4, 16, p0=p0, p_min=0.01)
    first = controller.update(active[0])
    assert (first <= p0) if active[0] >= 4 else (first >= p0)
    for value in active[1:]:
        assert 0.01 <= controller.update(value) <= 1.0


@pytest.mark.spec("dtop-p", "6.4")
@pytest.mark.parametrize("stuck", [1.0, 16.0])
def test_the_integral_does_not_wind_up(stuck: float) -> None:
    controller = PIThresholdController(4, 16, p0=0.5)
    for _ in range(1000):
        controller.update(stuck)
    assert controller.p == pytest.approx(1.0 if stuck < 4 else controller.p_min)
    assert abs(plant(controller, 30)[30] - 4) < 1.0


@pytest.mark.spec("dtop-p", "6.5")
def test_the_normaliser() -> None:
    logits = rows(9, dtype=torch.float64) * 5 + 3
    scale = torch.tensor(1.7, dtype=torch.float64)
    standard = normalize_router_logits(logits, scale) / scale
    torch.testing.assert_close(standard.mean(-1), torch.zeros(9, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(standard.std(-1, correction=0), torch.ones(9, dtype=torch.float64), atol=1e-5, rtol=0)
    moved = normalize_router_logits(logits * 4.2 - 7, scale)
    torch.testing.assert_close(moved.softmax(-1), (standard * scale).softmax(-1), atol=1e-6, rtol=0)
    uniform = torch.full((9, D), 1 / D, dtype=torch.float64)
    torch.testing.assert_close(normalize_router_logits(logits, 0.0).softmax(-1), uniform)
    equal = torch.full((9, D), 2.0, dtype=torch.float64, requires_grad=True)
    result = normalize_router_logits(equal, scale)
    torch.testing.assert_close(result.softmax(-1), uniform)
    result.square().sum().backward()
    assert equal.grad is not None
    assert bool(torch.isfinite(equal.grad).all())


@pytest.mark.spec("dtop-p", "6.5")
def test_gradients_of_the_normaliser_and_the_router() -> None:
    logits = rows(4, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize_router_logits, (logits, scale))
    one = router(p0=0.6)
    one(rows(20)).weights_TE.square().sum().backward()
    for name, value in one.named_parameters():
        assert value.grad is not None, name
        assert float(value.grad.abs().sum()) > 0, name


@pytest.mark.spec("dtop-p", "6.6")
def test_a_target_of_all_experts_is_the_dense_mixture() -> None:
    torch.manual_seed(0)
    one = router(target=E)
    experts = FFNExperts(D, 6, E)
    x = rows(30)
    y, routing = MoE(experts, one)(x)
    assert one.controller.p == 1.0
    assert bool((routing.active_T == E).all())
    dense = dense_reference(experts, x, Routing.from_dense(routing.probs_TE))
    torch.testing.assert_close(y, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.spec("dtop-p", "6.6")
def test_a_target_of_one_is_top_one_with_weight_one() -> None:
    one, x = router(target=1, kp=0.5, ki=1.0), rows(30)
    for _ in range(300):
        routing = one(x)
        end_step(one)
    assert bool((routing.active_T == 1).all())
    assert torch.equal(routing.expert_ids_TK[:, 0], routing.logits_TE.argmax(-1))
    assert bool((routing.weights_TK == 1).all())


@pytest.mark.spec("dtop-p", "6.7")
def test_a_saved_and_reloaded_run_gives_the_same_thresholds_bit_for_bit() -> None:
    def run(one: DynamicTopPRouter, steps: range) -> list[float]:
        found = []
        for step in steps:
            one(rows(25, seed=step) * (1 + step % 3))
            end_step(one)
            found.append(one.controller.p)
        return found

    one, two = router(), router(seed=1)
    run(one, range(7))
    saved = {name: value.clone() for name, value in one.state_dict().items()}
    rest = run(one, range(7, 15))
    two.load_state_dict(saved)
    assert run(two, range(7, 15)) == rest
    assert len(set(rest)) > 1
    # A cast on the way does not round the state either.
    three = router(seed=2)
    three.load_state_dict({name: value.bfloat16() for name, value in saved.items()})
    two.load_state_dict(saved)
    assert three.controller.p == two.controller.p
    assert two.to(torch.bfloat16).controller.p == three.float().controller.p


@pytest.mark.spec("dtop-p", "6.7")
def test_nothing_of_the_controller_requires_grad() -> None:
    one = router()
    one(rows(20)).weights_TK.sum().backward()
    end_step(one)
    assert not list(one.controller.parameters())
    assert not one.controller.threshold.requires_grad


@pytest.mark.spec("dtop-p", "6.8")
def test_dispatch_equals_the_dense_sum_and_costs_the_filled_slots() -> None:
    torch.manual_seed(0)
    experts, x = FFNExperts(D, 6, E), rows(40)
    routing = router(p0=0.5)(x)
    assert len(set(routing.active_T.tolist())) > 1
    torch.testing.assert_close(experts(x, routing), dense_reference(experts, x, routing), atol=1e-5, rtol=1e-5)
    assert sum(routing.dispatch.counts) == len(routing.dispatch.row_N) == int(routing.mask_TE.sum())
    assert routing.slots == int(routing.active_T.max())


@pytest.mark.spec("dtop-p", "6.9")
def test_micro_batches_give_the_update_of_the_whole_batch() -> None:
    whole, parts = router(p0=0.6), router(p0=0.6)
    x = rows(40)
    whole(x)
    for part in x.split(10):
        parts(part)
    for one in (whole, parts):
        end_step(one)
    assert whole.controller.p == pytest.approx(parts.controller.p, abs=1e-9)
    assert whole.controller.p != 0.6


class Stack(nn.Module):
    """Three layers of routers, as a model has them."""

    def __init__(self, **options) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.layers = nn.ModuleList(router(seed=index, **options) for index in range(3))

    def forward(self, x: Tensor) -> list[Routing]:
        return [layer(x) for layer in self.layers]


def test_one_controller_serves_a_model_and_belongs_to_it() -> None:
    model = Stack(p0=0.6)
    (controller,) = share_controllers(model)
    assert share_controllers(model) == [controller]
    assert [name for name in model.state_dict() if "state_bytes" in name] == ["threshold_controllers.0.state_bytes"]
    routings = model(rows(30))
    mean = sum(float(r.active_T.double().mean()) for r in routings) / 3
    end_step(model)
    assert controller.p == pytest.approx(0.6 + 0.2 * (3 - mean) / E)
    assert all(layer.controller is controller for layer in model.layers)
    other = copy.deepcopy(model)
    other(rows(30))
    end_step(other)
    assert other.layers[0].controller is other.threshold_controllers[0]
    assert other.threshold_controllers[0].p != controller.p


def test_layers_of_scope_layer_keep_their_own_and_hold_the_target_each() -> None:
    model = Stack(scope="layer")
    assert share_controllers(model) == []
    for step in range(150):
        routings = model(rows(200, seed=step))
        end_step(model)
    assert len({layer.controller.p for layer in model.layers}) == 3
    for routing in routings:
        assert float(routing.active_T.double().mean()) == pytest.approx(3, abs=0.25)


def test_the_first_batch_in_training_sets_the_start() -> None:
    one, x = router(target=2.6), rows(50)
    start = one.controller.p
    one.eval()(x)
    assert (one.controller.p, one.controller.calibrated) == (start, False)
    routing = one.train()(x)
    assert one.controller.p == pytest.approx(float(routing.probs_TE.topk(3).values.sum(-1).mean().detach()), rel=1e-6)
    one(rows(50, seed=1))
    assert one.controller.p == pytest.approx(float(routing.probs_TE.topk(3).values.sum(-1).mean().detach()), rel=1e-6)
    padded = torch.cat([x, torch.zeros(20, D)])
    other = router(target=2.6)
    other(padded, Context(token_mask_T=torch.arange(70) < 50))
    assert other.controller.p == pytest.approx(one.controller.p, abs=1e-12)


def test_the_start_before_any_batch_is_that_of_normal_logits() -> None:
    assert default_threshold(4, 16) == pytest.approx(0.61, abs=0.02)
    assert default_threshold(8, 64) == pytest.approx(0.43, abs=0.02)
    assert default_threshold(3, 3) == pytest.approx(1.0)
    assert default_threshold(1, 1) == 1.0


@pytest.mark.case("C11")
def test_evaluation_and_recomputation_count_nothing() -> None:
    once, twice, x = router(p0=0.6), router(p0=0.6), rows(30).requires_grad_()
    once(x)
    checkpoint(lambda y: twice(y).weights_TK, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    twice.eval()(rows(99))
    for one in (once, twice):
        end_step(one)
    assert once.controller.p == twice.controller.p != 0.6
    end_step(once)  # nothing observed since
    assert once.controller.p == twice.controller.p


def test_padded_rows_are_empty_and_not_counted() -> None:
    bare, masked = router(p0=0.6), router(p0=0.6)
    x = rows(30)
    bare(x)
    routing = masked(torch.cat([x, torch.full((7, D), 3.0)]), Context(token_mask_T=torch.arange(37) < 30))
    assert bool((routing.active_T[30:] == 0).all())
    assert bool((routing.weights_TK[30:] == 0).all())
    end_step(bare)
    end_step(masked)
    assert bare.controller.p == masked.controller.p


def test_another_choice_is_weighed_by_the_same_rule() -> None:
    one, x = router(p0=0.7).eval(), rows(20)
    routing = one(x)
    context = Context()
    again = one.decide(routing.logits_TE, routing.expert_ids_TK, context)
    assert torch.equal(again.weights_TK, routing.weights_TK)
    allowed = torch.zeros(20, E, dtype=torch.bool)
    allowed[:, 2:5] = True
    allowed[3] = False
    ids = one.choose(routing.logits_TE, context, allowed)
    forced = one.decide(routing.logits_TE, ids, context)
    assert bool(allowed.gather(1, ids.clamp(max=E - 1))[forced.filled_TK].all())
    assert int(forced.active_T[3]) == 0
    sums = forced.weights_TK.sum(1)
    torch.testing.assert_close(sums, (torch.arange(20) != 3).float())
    logits = torch.zeros(2, E, requires_grad=True)
    one.weigh(logits, torch.full((2, 2), E), context).sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_the_running_average_smooths_what_the_controller_sees() -> None:
    plain, smooth = PIThresholdController(4, 16, p0=0.5), PIThresholdController(4, 16, p0=0.5, ema=0.9)
    for active in (8.0, 0.0, 8.0, 0.0):
        plain.update(active)
        smooth.update(active)
    assert smooth.p < 0.5 - 0.05 < plain.p
    smooth.reset()
    assert (smooth.p, smooth.error_sum) == (0.5, 0.0)


@pytest.mark.spec("dtop-p", "3")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: router(target=0.5), r"target must lie in \[1, num_experts = 8\], got 0.5"),
        (lambda: router(target=9), "target must lie in"),
        (lambda: router(scope="global"), "scope must be one of"),
        (lambda: router(p0=1.5), "p0 must lie in"),
        (lambda: router(kp=-0.1), "kp must be finite and >= 0"),
        (lambda: router(ema=1.0), "ema must lie in"),
        (lambda: router(p_min=0.0), "p_min"),
        (lambda: TopPRouter(D, E, 0.0), r"p must lie in \(0, 1\], got 0.0"),
        (lambda: TopPRouter(D, E, 1.1), "p must lie in"),
        (lambda: top_p_select(PROBS, math.nan), "p must lie in"),
        (lambda: share_controllers(nn.ModuleList([router()])), "model is a ModuleList"),
        (lambda: router().share(PIThresholdController(2, 4)), "for 4 experts, this router has 8"),
        (lambda: PIThresholdController(2, 4).calibrate(torch.ones(3, 5)), r"probs_TE must have shape \(T, 4\)"),
    ],
)
def test_bad_input(build, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.spec("dtop-p", "3")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 17.0])
def test_a_count_that_is_none_leaves_the_state_unchanged(bad: float) -> None:
    controller = PIThresholdController(4, 16, p0=0.5)
    controller.update(6.0)
    before = controller.state_bytes.clone()
    with pytest.raises(ValueError, match="mean_active"):
        controller.update(bad)
    with pytest.raises(ValueError, match="NaN"):
        controller.calibrate(torch.full((2, 16), math.nan))
    assert torch.equal(controller.state_bytes, before)


@pytest.mark.spec("dtop-p", "3")
def test_an_update_before_any_forward_is_refused() -> None:
    controller = PIThresholdController(4, 16)
    with pytest.raises(RuntimeError, match="before any forward"):
        controller.update(4.0)
    end_step(controller)
    controller.calibrate(torch.full((0, 16), 0.5))
    assert not controller.calibrated


@pytest.mark.case("C14")
@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count: int) -> None:
    one = router()
    routing = one(rows(count))
    assert routing.num_rows == count
    end_step(one)
    assert math.isfinite(one.controller.p)


def test_a_fixed_threshold_is_the_unnormalised_rule() -> None:
    torch.manual_seed(0)
    one, x = TopPRouter(D, E, 0.55), rows(20)
    routing = one(x)
    mask, weights = top_p_select(routing.logits_TE.softmax(-1), 0.55)
    assert torch.equal(routing.mask_TE, mask)
    torch.testing.assert_close(routing.weights_TE, weights)
    torch.testing.assert_close(routing.logits_TE, x @ one.weight_ED.T)
