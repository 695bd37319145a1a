"""A router for each head: limits, independence, balance."""

import pytest
import torch

from moesaic.layers import MoE
from moesaic.losses import BalanceLoss
from moesaic.models import moe_layers, override_routing
from moesaic.routing import Context, MultiHeadRouter, Routing, checks
from tests.routing.helpers import MatrixBank, rows

H, C, E, K = 3, 4, 15, 2
STREAMING = pytest.mark.parametrize("streaming", [False, True])


def router_of(streaming=True, seed=0, **kwargs):
    torch.manual_seed(seed)
    return MultiHeadRouter(H * C, E, **({"top_k": K, "num_heads": H, "streaming": streaming, "tile": 2} | kwargs))


@STREAMING
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_each_head_takes_its_own_best(streaming, score):
    router, x = router_of(streaming, score=score), rows(20, H * C)
    routing = router(x)
    assert routing.expert_ids_TK.shape == (20, H * K) and router.top_k == H * K
    for head in range(H):
        scores = x[:, head * C : (head + 1) * C] @ router.keys_EC[head * 5 : head * 5 + 5].t()
        best, ids = scores.sort(dim=1, descending=True, stable=True)
        slots = slice(head * K, head * K + K)
        assert torch.equal(routing.expert_ids_TK[:, slots], ids[:, :K] + 5 * head)
        weights = best[:, :K].softmax(-1) if score == "softmax" else best[:, :K].sigmoid()
        torch.testing.assert_close(routing.weights_TK[:, slots], weights)


def test_streaming_and_dense_agree_with_gradient():
    x = rows(30, H * C).requires_grad_()
    found = []
    for streaming in (False, True):
        router = router_of(streaming, bias=True)
        with torch.no_grad():
            router.selection_bias_E.normal_(generator=torch.Generator().manual_seed(5))
        routing = router(x)
        loss = (routing.weights_TE * torch.arange(E)).square().sum()
        found.append((routing.expert_ids_TK, routing.weights_TK, *torch.autograd.grad(loss, (x, router.keys_EC))))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_probabilities_of_a_head_sum_to_its_share():
    routing = router_of(False)(rows(9, H * C))
    torch.testing.assert_close(routing.probs_TE.view(9, H, -1).sum(-1), torch.full((9, H), 1 / H))
    assert router_of(True)(rows(9, H * C)).logits_TE is None
    with pytest.raises(ValueError, match="no logits_TE"):
        _ = router_of(True)(rows(9, H * C)).probs_TE
    layer = MoE(MatrixBank(H * C, E), router_of(False), losses=[BalanceLoss(0.1)])
    layer(rows(9, H * C))[1].losses["balance"].backward()
    assert layer.router.keys_EC.grad.any()


@pytest.mark.spec("multi-head-latent-moe", "6.10")
@STREAMING
def test_worked_example_of_the_bias(streaming):
    router = MultiHeadRouter(1, 4, 2, num_heads=1, bias=True, bias_rate=0.01, streaming=streaming).train()
    ids_TK = torch.tensor([[0, 1], [0, 2]])  # loads (.5, .25, .25, 0), mean .25
    router.observe(Routing(ids_TK, torch.ones(2, 2), 4))
    router.end_step()
    torch.testing.assert_close(router.selection_bias_E, 0.01 * torch.tensor([-1.0, 0, 0, 1]))


@pytest.mark.spec("multi-head-latent-moe", "6.9")
@STREAMING
def test_bias_balances_each_head_and_keeps_its_mean(streaming):
    router = router_of(streaming, bias=True, bias_rate=0.02).train()
    x = rows(200, H * C) + 1.0
    first = router(x).load_E.view(H, -1)
    for _ in range(60):
        router(x)
        router.end_step()
        assert (router.selection_bias_E.view(H, -1).mean(1).abs() < 1e-6).all()
    busiest = first.argmax(1)
    assert (router.selection_bias_E.view(H, -1)[torch.arange(H), busiest] < 0).all()
    last = router.eval()(x).load_E.view(H, -1)
    assert (last.amax(1) < first.amax(1)).all()
    # Weights come from clean scores, and one constant for all changes nothing.
    routing = router(x)
    plain = router_of(streaming)
    with torch.no_grad():
        plain.keys_EC.copy_(router.keys_EC)
        scores = torch.einsum("thc,hec->the", x.view(-1, H, C), plain.keys_EC.view(H, 5, C)).flatten(1)
        clean = scores.gather(1, routing.expert_ids_TK).view(-1, H, K).softmax(-1).flatten(1)
        torch.testing.assert_close(routing.weights_TK, clean, rtol=1e-4, atol=1e-5)
        router.selection_bias_E += 0.5
    assert torch.equal(router(x).expert_ids_TK, routing.expert_ids_TK)


@STREAMING
def test_padding_counts_nowhere(streaming):
    router = router_of(streaming, bias=True).train()
    x, mask = rows(6, H * C), torch.tensor([True, False, True, True, False, True])
    x[~mask] = torch.nan
    routing = router(x, Context(token_mask_T=mask))
    assert (routing.expert_ids_TK[~mask] == E).all() and not routing.weights_TK[~mask].any()
    assert int(routing.load_E.sum()) == 4 * H * K
    routing.weights_TK.sum().backward()
    assert torch.isfinite(router.keys_EC.grad).all()


def test_other_choices_are_weighed_by_head():
    layer = MoE(MatrixBank(H * C, E), router_of(False))
    x = rows(7, H * C)
    own = layer(x)[1]
    allowed = torch.ones(7, E, dtype=torch.bool)
    allowed[:, 5:9] = False  # one expert is left to head 1

    def narrow(call):
        return call.choose(allowed_TE=allowed)

    with override_routing(layer, narrow):
        changed = layer(x)[1]
    assert (changed.expert_ids_TK[:, K : 2 * K].sort(1).values == torch.tensor([9, E])).all()
    torch.testing.assert_close(changed.weights_TE.view(7, H, 5).sum(-1), torch.ones(7, H))
    torch.testing.assert_close(changed.weights_TE[:, 10:], own.weights_TE[:, 10:])
    # Any slots in any order: weighed like the own choice.
    order = torch.randperm(H * K, generator=torch.Generator().manual_seed(1))
    with override_routing(layer, lambda call: call.choose(call.routing.expert_ids_TK[:, order])):
        torch.testing.assert_close(layer(x)[1].weights_TE, own.weights_TE)
    assert moe_layers(layer)[0].top_k == H * K
    layer.router.streaming = True
    with pytest.raises(ValueError, match="forms no logits"), override_routing(layer, narrow):
        layer(x)


@STREAMING
def test_stays_float32_and_accepts_low_precision(streaming):
    router = router_of(streaming, bias=True).to(torch.bfloat16)
    assert router.keys_EC.dtype == router.selection_bias_E.dtype == torch.float32
    assert router(rows(5, H * C).bfloat16()).weights_TK.dtype == torch.float32
    assert router(rows(5, H * C, dtype=torch.float64)).weights_TK.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_k": 1}, "top_k = 1 makes every softmax weight 1"),
        ({"top_k": 6}, "top_k must be between 1 and the 5"),
        ({"num_heads": 2}, "num_heads must divide"),
        ({"num_heads": 0}, "num_heads"),
        ({"score": "relu"}, "score"),
        ({"bias_rate": -1.0}, "bias_rate"),
        ({"tile": 0}, "tile"),
    ],
)
def test_bad_arguments(change, match):
    with pytest.raises(ValueError, match=match):
        router_of(**change)


@STREAMING
def test_one_expert_a_head_is_allowed_where_it_can_learn_or_is_meant(streaming):
    x = rows(5, H * C)
    assert (router_of(streaming, top_k=1, allow_constant_gate=True)(x).weights_TK == 1).all()
    assert (router_of(streaming, top_k=1, score="sigmoid")(x).weights_TK < 1).all()


@STREAMING
def test_nan_is_refused(streaming):
    router, x = router_of(streaming), rows(5, H * C)
    x[3, 0] = torch.nan
    with pytest.raises(ValueError, match="row 3"), checks(True):
        router(x)
    with torch.no_grad():
        router.keys_EC[7] = -torch.nan
    with pytest.raises(ValueError, match="scores are not finite"), checks(True):
        router(rows(5, H * C))
