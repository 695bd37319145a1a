"""Latent experts: their limits, what flows where, and equality with ordinary experts."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.experts import FFNExperts, LatentExperts, SharedExpert, backend, dense_reference
from moesaic.layers import LatentMoEConfig, MoE
from moesaic.routing import Context, Routing, TopKRouter, checks, parameter_specs

D, F, E, K, Z = 8, 5, 6, 3, 4


def rows_of(count=11, dtype=torch.float32, seed=0):
    return torch.randn(count, D, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def layer_of(activation="swiglu", shared=True, seed=0, top_k=K, **kwargs):
    torch.manual_seed(seed)
    bank = LatentExperts(D, F, E, activation=activation, **({"latent_size": Z} | kwargs))
    return MoE(bank, TopKRouter(D, E, top_k), SharedExpert(D, F, activation) if shared else None)


@pytest.mark.spec("latent-moe", "6.1")
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_identity_projections_give_the_ordinary_layer(activation):
    layer = layer_of(activation, compression=1, latent_size=None)
    plain = FFNExperts(D, F, E, activation=activation)
    with torch.no_grad():
        layer.experts.down_ZD.copy_(torch.eye(D))
        layer.experts.up_OZ.copy_(torch.eye(D))
        for name, weight in plain.weights().items():
            weight.copy_(layer.experts.weights()[name])
    y, _ = layer(rows_of())
    expected, _ = MoE(plain, layer.router, layer.shared)(rows_of())
    assert (y - expected).abs().max() < 1e-6


@pytest.mark.spec("latent-moe", "6.2")
@pytest.mark.parametrize("bias", [False, True])
def test_equals_ordinary_experts_between_the_projections(bias):
    layer = layer_of(shared=False, bias=bias)
    bank, x_TD = layer.experts, rows_of()
    routing = layer.router(x_TD)
    y_TD = bank(x_TD, routing)
    assert (y_TD - dense_reference(bank, x_TD, routing)).abs().max() < 1e-5
    # W_up before the weighted sum (open steps) or after it (fused).
    assert (y_TD - bank.combine(bank.outputs(x_TD, routing, Context()), routing)).abs().max() < 1e-5
    # The same as an ordinary bank with the products of the matrices.
    plain = FFNExperts(D, F, E, bias=bias)
    with torch.no_grad():
        products = {
            "gate": lambda weight: weight @ bank.down_ZD,
            "up": lambda weight: weight @ bank.down_ZD,
            "down": lambda weight: bank.up_OZ @ weight,
            "down_bias": lambda weight: weight @ bank.up_OZ.t(),
        }
        for name, weight in bank.weights().items():
            plain.weights()[name].copy_(products[name](weight) if name in products else weight)
    assert (y_TD - plain(x_TD, routing)).abs().max() < 1e-5


@pytest.mark.spec("latent-moe", "6.3")
def test_shared_experts_see_the_full_width():
    layer, x_TD = layer_of(), rows_of()
    with torch.no_grad():
        layer.experts.up_OZ.zero_()
    assert torch.equal(layer(x_TD)[0], layer.shared(x_TD))
    with torch.no_grad():
        layer.experts.down_ZD.normal_()
    assert torch.equal(layer(x_TD)[0], layer.shared(x_TD))


@pytest.mark.spec("latent-moe", "6.4")
def test_the_router_sees_the_full_row_and_sends_no_gradient_through_the_projection():
    layer, x_TD = layer_of(shared=False), rows_of()
    y, routing = layer(x_TD)
    (y.square().sum() + routing.logits_TE.square().sum()).backward()
    assert layer.router.weight_ED.grad.abs().max() > 0
    layer.zero_grad()
    with torch.no_grad():  # silent experts: whatever reaches W_down would come from the router
        layer.experts.bank.down_EDF.zero_()
    y, routing = layer(x_TD)
    (y.sum() + routing.logits_TE.square().sum()).backward()
    assert not layer.experts.down_ZD.grad.any()
    assert layer.router.weight_ED.grad.any()
    # Rows that differ only where W_down is blind still go elsewhere.
    blind_D = torch.linalg.svd(layer.experts.down_ZD.detach()).Vh[-1]
    moved, _ = layer.router(x_TD + 20 * blind_D), layer.experts
    assert not torch.equal(moved.expert_ids_TK, layer.router(x_TD).expert_ids_TK)


@pytest.mark.spec("latent-moe", "6.6")
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_flop_formula_equals_counted_products(activation, latent):
    from moesaic.analysis.moe_cost import moe_cost

    config = LatentMoEConfig(D, E, K, F, Z if latent else None, 2, 7, activation)
    layer, rows = config.build(), 13
    with FlopCounterMode(display=False) as counter, backend("reference"), torch.no_grad():
        layer(rows_of(rows))
    cost = moe_cost(config, rows)
    assert counter.get_total_flops() == rows * cost.flops_per_token
    assert sum(p.numel() for p in layer.parameters()) == cost.params_total
    assert sum(w.numel() for w in layer.experts.weights().values()) == cost.params_routed


@pytest.mark.spec("latent-moe", "6.10")
def test_shapes_determinism_permutation_and_dense_mixture():
    layer = layer_of()
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(3))
    y, routing = layer(x)
    assert y.shape == x.shape and routing.expert_ids_TK.shape == (10, K)
    assert routing.weights_TK.shape == (10, K) and routing.load_E.shape == (E,)
    assert torch.equal(layer(x.view(10, D))[0], y.view(10, D))
    assert torch.equal(layer_of()(x)[0], y)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(layer(x.view(10, D)[order])[0], y.view(10, D)[order])
    full = layer_of(shared=False, top_k=E)
    x_TD = x.view(10, D)
    probs_TE = (x_TD @ full.router.weight_ED.t()).softmax(-1)
    bank = full.experts
    outputs = [bank.rows(x_TD, [10 * (e == i) for e in range(E)], Context()) for i in range(E)]
    mixture = sum(probs_TE[:, e, None] * out for e, out in enumerate(outputs))
    assert (full(x_TD)[0] - mixture).abs().max() < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_those_of_the_open_steps(recompute):
    grads = []
    for name in ("fused", "reference"):
        layer = layer_of(recompute=recompute).double()
        with backend(name):
            layer(rows_of(dtype=torch.float64))[0].square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    for fused, plain in zip(*grads, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    layer = layer_of().double()
    routing = layer.router(rows_of(5, torch.float64)).detach()
    bank = layer.experts

    def compute(x_TD, *parameters):
        return bank(x_TD, routing)

    x_TD = rows_of(5, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(compute, (x_TD, *bank.parameters()), fast_mode=True)


def test_rows_without_experts_get_exactly_zero_and_padding_costs_nothing():
    bank = layer_of().experts
    ids_TK = torch.tensor([[0, E], [E, E], [2, 1]])
    y_TD = bank(rows_of(3), Routing(ids_TK, (ids_TK < E).float(), E))
    assert not y_TD[1].any() and y_TD[0].any() and y_TD[2].any()
    assert bank(rows_of(0), Routing(ids_TK[:0], torch.zeros(0, 2), E)).shape == (0, D)


def test_nan_in_padding_reaches_no_gradient():
    layer, x_TD = layer_of(shared=False), rows_of(3)
    x_TD[1] = torch.nan
    y, _ = layer(x_TD, Context(token_mask_T=torch.tensor([True, False, True])))
    assert not y[1].any()
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_a_replaced_step_is_used():
    class Doubled(LatentExperts):
        def combine(self, outputs_TKO, routing):
            return 2 * super().combine(outputs_TKO, routing)

    bank = layer_of().experts
    doubled = Doubled(D, F, E, latent_size=Z)
    doubled.load_state_dict(bank.state_dict())
    routing = TopKRouter(D, E, K)(rows_of())
    torch.testing.assert_close(doubled(rows_of(), routing), 2 * bank(rows_of(), routing))


def test_dtypes():
    layer = layer_of()
    expected = layer(rows_of())[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(rows_of())[0].float() - expected).abs().max() < 0.05 * expected.abs().max()
    low = copy.deepcopy(layer).bfloat16()
    assert low(rows_of().bfloat16())[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"experts are torch\.bfloat16"):
        low.experts(rows_of(), layer.router(rows_of()))


def test_axes_say_what_is_latent():
    specs = {name: spec for name, _, spec in parameter_specs(layer_of().experts)}
    assert specs["down_ZD"].axes == ("latent", "model") and specs["up_OZ"].axes == ("out", "latent")
    assert specs["bank.up_EFD"].axes == ("expert", "width", "latent")
    assert specs["bank.down_EDF"].axes == ("expert", "latent", "width")


def test_zero_start_and_published_start():
    assert not LatentExperts(D, F, E, zero_down=True)(rows_of(), layer_of().router(rows_of())).any()
    torch.manual_seed(0)
    config = LatentMoEConfig(64, 8, 2, 64, 16, 1, init_std=0.02, num_layers=8)
    layer = config.build()
    into = {"experts.up_OZ", "experts.bank.down_EDF", "shared.down.weight"}
    for name, parameter in layer.named_parameters():
        expected = 0.02 / 4 if name in into else 0.02
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.1), name


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"latent_size": D + 1}, "latent_size must be between 1 and the model width 8, got 9"),
        ({"latent_size": 0}, "latent_size"),
        ({"compression": 3}, "compression must be a positive divisor"),
        ({"compression": 0}, "compression"),
        ({"compression": 2, "latent_size": 4}, "not both"),
        ({"activation": "tanh"}, "activation"),
    ],
)
def test_bad_sizes(kwargs, match):
    with pytest.raises(ValueError, match=match):
        LatentExperts(D, F, E, **kwargs)


def test_bad_inputs():
    layer = layer_of()
    with pytest.raises(ValueError, match=r"x must have shape \(..., 8\)"):
        layer(torch.zeros(3, D - 1))
    with pytest.raises(ValueError, match="scores are not finite"), checks(True):
        layer(torch.full((2, D), torch.nan))
    for field in ("dim", "width", "num_experts"):
        with pytest.raises(ValueError, match=field):
            LatentExperts(**({"dim": D, "width": F, "num_experts": E} | {field: 0}))


def test_active_parameters_count_the_projections_once():
    from moesaic.analysis.moe_cost import moe_cost
    from moesaic.analysis.statistics import parameter_count

    config = LatentMoEConfig(D, E, K, F, Z, 1)
    found, cost = parameter_count(config.build()), moe_cost(config, 1)
    assert (found.total, found.active) == (cost.params_total, cost.params_active)
