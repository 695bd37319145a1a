"""Attention against a plain loop, grouped heads, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moesaic.layers.attention import Attention
from moesaic.layers.rotary import rotary_angles, rotate

ATTEND = ALL_ATTENTION_FUNCTIONS["sdpa"]


def attention(**options) -> Attention:
    torch.manual_seed(0)
    layer = Attention(16, 4, **options).double()
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            getattr(layer, name).weight.data.normal_(1, 0.3)
    return layer


def inputs(length: int = 6) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cos, sin = rotary_angles(torch.arange(length)[None], 4, 100.0)
    return x, (cos.double(), sin.double())


def reference(layer: Attention, x_BSD: torch.Tensor, rotary) -> torch.Tensor:
    """Head by head and position by position."""
    batch, length, _ = x_BSD.shape
    q, k, v = layer.q_proj(x_BSD), layer.k_proj(x_BSD), layer.v_proj(x_BSD)
    if layer.q_norm is not None and layer.q_norm.dim == q.shape[-1]:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k, v = (t.view(batch, length, -1, layer.head_dim).transpose(1, 2) for t in (q, k, v))
    if layer.q_norm is not None and layer.q_norm.dim == layer.head_dim:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = rotate(q, *rotary), rotate(k, *rotary)
    heads = []
    for head in range(layer.num_heads):
        kv = head // layer.num_key_value_groups
        rows = []
        for t in range(length):
            weights = (k[:, kv, : t + 1] @ q[:, head, t, :, None] * layer.scaling).softmax(1)
            rows.append((weights * v[:, kv, : t + 1]).sum(1))
        heads.append(torch.stack(rows, 1))
    return layer.o_proj(torch.cat(heads, -1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "qk_norm": False},
        {"head_dim": 4, "scale": 0.7},
        {"norm": "layer", "num_kv_heads": 2},
        {"qk_norm": "full", "num_kv_heads": 2},
    ],
    ids=str,
)
def test_equals_the_plain_loop(options):
    layer = attention(**options)
    x, rotary = inputs()
    torch.testing.assert_close(layer(x, rotary, ATTEND), reference(layer, x, rotary))


def test_gradient_reaches_every_parameter():
    layer = attention(num_kv_heads=2)
    x, rotary = inputs(3)
    x = x[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, rotary, ATTEND), x)
    layer(x, rotary, ATTEND).square().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in layer.parameters())


def test_keys_of_an_earlier_call_continue_it():
    layer = attention(num_kv_heads=2)
    x, (cos, sin) = inputs()
    whole = layer(x, (cos, sin), ATTEND)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def extend(k, v):
        kept.append((k, v))
        return tuple(torch.cat(parts, 2) for parts in zip(*kept, strict=True))

    parts = [
        layer(x[:, t : t + 1], (cos[:, :, t : t + 1], sin[:, :, t : t + 1]), ATTEND, extend=extend)
        for t in range(x.shape[1])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_does_not_see_the_future():
    layer = attention()
    x, rotary = inputs()
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(layer(changed, rotary, ATTEND)[:, :4], layer(x, rotary, ATTEND)[:, :4], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads = 4, got 3"),
        ({"num_heads": 3}, "num_heads must divide dim = 16 when head_dim is not given, got 3"),
        ({"num_heads": 2, "head_dim": 5}, "head_dim must be even and at least 2"),
        ({"num_heads": 0}, "got 0"),
        ({"num_heads": 2, "norm": "batch"}, "norm must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Attention(16, **arguments)
