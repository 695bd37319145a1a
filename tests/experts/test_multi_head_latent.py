"""Multi-head latent experts: limits, independence of heads, both backends."""

import copy
import gc
import weakref

import pytest
import torch

from moesaic.experts import FFNExperts, MultiHeadLatentExperts, dense_reference
from moesaic.layers import MoE
from moesaic.models import moe_layers, override_routing, record_routing
from moesaic.routing import Context, Routing, TopKRouter, parameter_specs

D, F, H, HEAD_EXPERTS, K = 12, 6, 3, 4, 2
E = H * HEAD_EXPERTS
BACKEND = pytest.mark.parametrize("backend", ["grouped", "packed"])


def rows_of(count=11, dtype=torch.float32, seed=0):
    return torch.randn(count, D, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def bank_of(seed=0, **kwargs):
    torch.manual_seed(seed)
    return MultiHeadLatentExperts(D, F, E, **({"num_heads": H, "top_k": K, "block_size": 4} | kwargs))


def by_definition(bank, x_TD, routing):
    """Every head's experts on its sub-token, from the formula."""
    heads = []
    for head in range(H):
        u_TC = x_TD @ bank.split_HCD[head].t()
        o_TC = torch.zeros_like(u_TC)
        for e in range(head * HEAD_EXPERTS, (head + 1) * HEAD_EXPERTS):
            f_TC = torch.nn.functional.gelu(u_TC @ bank.bank.up_EFD[e].t()) @ bank.bank.down_EDF[e].t()
            o_TC = o_TC + routing.weights_TE[:, e, None].to(f_TC.dtype) * f_TC
        heads.append(o_TC)
    return torch.cat(heads, 1) @ bank.merge_OHC.flatten(1).t()


@BACKEND
@pytest.mark.parametrize("head_size", [None, 5])
def test_equals_the_formula(backend, head_size):
    bank, x_TD = bank_of(backend=backend, head_size=head_size), rows_of()
    y, routing = MoE(bank)(x_TD)
    assert routing.expert_ids_TK.shape == (11, H * K)
    assert (y - by_definition(bank, x_TD, routing)).abs().max() < 1e-5
    assert (y - dense_reference(bank, x_TD, routing)).abs().max() < 1e-5
    assert (y - bank.combine(bank.outputs(x_TD, routing, Context()), routing)).abs().max() < 1e-5


@pytest.mark.spec("multi-head-latent-moe", "6.5")
@BACKEND
def test_one_head_with_identities_is_an_ordinary_layer(backend):
    bank = MultiHeadLatentExperts(D, F, 5, num_heads=1, top_k=2, backend=backend, block_size=4)
    plain, router = FFNExperts(D, F, 5, activation="gelu"), TopKRouter(D, 5, 2, renormalize=True)
    with torch.no_grad():
        bank.split_HCD.copy_(torch.eye(D)[None])
        bank.merge_OHC.copy_(torch.eye(D)[:, None])
        router.weight_ED.copy_(bank.router.keys_EC)
        for name, weight in plain.weights().items():
            weight.copy_(bank.weights()[name])
    y, routing = MoE(bank)(rows_of())
    expected, ordinary = MoE(plain, router)(rows_of())
    assert torch.equal(routing.expert_ids_TK, ordinary.expert_ids_TK)
    assert (y - expected).abs().max() < 1e-5


@pytest.mark.spec("multi-head-latent-moe", "6.6")
@BACKEND
def test_heads_are_independent(backend):
    bank, x_TD = bank_of(backend=backend), rows_of()
    layer = MoE(bank)

    def heads():
        return bank.heads(bank.split(x_TD), layer.route(x_TD, Context()))

    before = heads()
    with torch.no_grad():
        bank.router.keys_EC[HEAD_EXPERTS : 2 * HEAD_EXPERTS].neg_()
    after = heads()
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


@pytest.mark.spec("multi-head-latent-moe", "6.7")
@BACKEND
def test_all_experts_give_the_softmax_mixture_of_each_head(backend):
    bank, x_TD = bank_of(top_k=HEAD_EXPERTS, backend=backend), rows_of()
    u_THC = bank.split(x_TD)
    scores = torch.einsum("thc,hec->the", u_THC, bank.router.keys_EC.view(H, HEAD_EXPERTS, -1))
    mixture = Routing.from_dense(scores.softmax(-1).flatten(1))
    assert (MoE(bank)(x_TD)[0] - by_definition(bank, x_TD, mixture)).abs().max() < 1e-5


@pytest.mark.spec("multi-head-latent-moe", "6.13")
def test_separate_routing_tokens():
    joined, separate = bank_of(), bank_of(separate_routing_tokens=True)
    wide = bank_of(separate_routing_tokens=True, routing_size=7)
    count = lambda bank: sum(p.numel() for p in bank.parameters())  # noqa: E731
    assert count(separate) - count(joined) == D * H * joined.head_size
    assert wide.routing_HCD.numel() == D * H * 7
    separate.load_state_dict(joined.state_dict() | {"routing_HCD": joined.split_HCD.detach()})
    x_TD = rows_of()
    (y, routing), (other, own) = MoE(joined)(x_TD), MoE(separate)(x_TD)
    assert torch.equal(y, other) and torch.equal(routing.expert_ids_TK, own.expert_ids_TK)
    with torch.no_grad():
        separate.routing_HCD.normal_()
    y, routing = MoE(separate)(x_TD)
    assert not torch.equal(routing.expert_ids_TK, MoE(joined)(x_TD)[1].expert_ids_TK)
    assert (y - by_definition(separate, x_TD, routing)).abs().max() < 1e-5


@pytest.mark.parametrize("streaming", [False, True])
def test_backends_agree_with_gradient(streaming):
    found = []
    for backend in ("grouped", "packed"):
        bank = bank_of(backend=backend, router={"streaming": streaming}).double()
        x_TD = rows_of(dtype=torch.float64).requires_grad_()
        y, _ = MoE(bank)(x_TD)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x_TD, *bank.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@BACKEND
def test_gradcheck(backend):
    bank = bank_of(backend=backend).double()
    routing = MoE(bank).route(rows_of(4, torch.float64), Context()).detach()
    weights_TK = routing.weights_TK.double().requires_grad_()
    bank.router.requires_grad_(False)

    def compute(x_TD, weights_TK, *parameters):
        return bank(x_TD, routing.replace(weights_TK=weights_TK))

    leaves = (rows_of(4, torch.float64).requires_grad_(), weights_TK)
    assert torch.autograd.gradcheck(compute, (*leaves, *(p for p in bank.parameters() if p.requires_grad)))


@BACKEND
def test_any_router_may_choose_any_experts(backend):
    bank, x_TD = bank_of(backend=backend), rows_of()
    router = TopKRouter(D, E, 5)
    y, routing = MoE(bank, router)(x_TD)
    assert (y - by_definition(bank, x_TD, routing)).abs().max() < 1e-5
    ids_TK = torch.tensor([[0, E, 11], [E, E, E], [5, 4, 1]])
    routing = Routing(ids_TK, (ids_TK < E).float(), E)
    y = bank(rows_of(3), routing)
    assert (y - by_definition(bank, rows_of(3), routing)).abs().max() < 1e-5 and not y[1].any()
    assert bank(rows_of(0), Routing(ids_TK[:0], torch.zeros(0, 3), E)).shape == (0, D)


def test_sub_tokens_are_projected_once_and_not_kept(monkeypatch):
    bank, calls = bank_of(), []
    monkeypatch.setattr(bank, "split", lambda x: calls.append(1) or MultiHeadLatentExperts.split(bank, x))
    layer, x_TD = MoE(bank), rows_of()
    y, routing = layer(x_TD)
    assert len(calls) == 1
    kept = routing.extras["sub_tokens"]
    assert kept.x_TD is None and kept.u_THC is None
    # Another input with the same routing is projected anew.
    routing = layer.route(x_TD, Context())
    assert torch.equal(bank(x_TD.clone(), routing), y) and len(calls) == 3
    # A routing that nobody used does not stay in the module.
    routing = layer.route(x_TD, Context())
    reference = weakref.ref(routing.extras["sub_tokens"].u_THC)
    copy.deepcopy(layer)
    del routing
    gc.collect()
    assert reference() is None


def test_interventions_reach_it():
    layer, x_TD = MoE(bank_of(router={"streaming": False})), rows_of()
    with record_routing(layer) as record:
        layer(x_TD)
    assert record.calls[0].routing.expert_ids_TK.shape == (11, H * K)
    assert moe_layers(layer)[0].top_k == H * K and moe_layers(layer)[0].rule.weigh is not None
    allowed = torch.ones(E, dtype=torch.bool)
    allowed[0] = False
    with override_routing(layer, lambda call: call.choose(allowed_TE=allowed)):
        changed, routing = layer(x_TD)
    assert not routing.mask_TE[:, 0].any() and (routing.active_T == H * K).all()
    assert (changed - by_definition(layer.experts, x_TD, routing)).abs().max() < 1e-5


def test_padding():
    bank, mask = bank_of(backend="packed"), torch.tensor([True, False, True])
    x_TD = rows_of(3)
    x_TD[1] = torch.nan
    y, routing = MoE(bank)(x_TD, Context(token_mask_T=mask))
    assert not y[1].any() and int(routing.load_E.sum()) == 2 * H * K
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in bank.parameters())


@BACKEND
def test_dtypes(backend):
    layer = MoE(bank_of(backend=backend))
    expected = layer(rows_of())[0]
    low = copy.deepcopy(layer).bfloat16()
    assert low.experts.router.keys_EC.dtype == torch.float32
    assert low(rows_of().bfloat16())[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(rows_of())[0].float() - expected).abs().max() < 0.1 * expected.abs().max()
    with pytest.raises(ValueError, match=r"experts are torch\.bfloat16"):
        low(rows_of())


def test_zero_start_axes_and_active_parameters():
    from moesaic.analysis.statistics import parameter_count

    bank = bank_of(zero_down=True, separate_routing_tokens=True)
    assert not MoE(bank)(rows_of())[0].any()
    specs = {name: spec for name, _, spec in parameter_specs(bank)}
    assert specs["bank.up_EFD"].axes == ("expert", "width", "channel")
    assert specs["router.keys_EC"].role == specs["routing_HCD"].role == "router"
    found = parameter_count(MoE(bank))
    experts = sum(w.numel() for w in bank.weights().values())
    assert found.active == found.total - experts + experts * K // HEAD_EXPERTS


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 5}, "num_heads must divide num_experts = 12"),
        ({"num_heads": 0}, "num_heads"),
        ({"top_k": 1}, "top_k = 1"),
        ({"top_k": 5}, "top_k must be between 1 and the 4"),
        ({"head_size": 0}, "head_size"),
        ({"block_size": 0}, "block_size"),
        ({"backend": "fast"}, "backend"),
        ({"backend": "packed", "activation": "swiglu"}, "GELU experts only"),
        ({"routing_size": 3}, "separate_routing_tokens=True"),
        ({"router": {"score": "relu"}}, "score"),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=match):
        bank_of(**change)


def test_bad_input():
    with pytest.raises(ValueError, match="num_heads must divide the model width 10"):
        MultiHeadLatentExperts(10, F, 12, num_heads=4, top_k=2)
    with pytest.raises(ValueError, match=r"x must have shape \(..., 12\)"):
        MoE(bank_of())(torch.zeros(2, 13))
