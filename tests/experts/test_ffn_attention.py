"""A feed-forward net as attention with the softmax undone."""

import pytest
import torch
import torch.nn.functional as F

from moesaic.experts.ffn_attention import attention_of_ffn, ffn_as_attention, spans_as_attention


def case(rows=40, units=50, width=8, out=6, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    return scale * draw(rows, width), draw(units, width) / width**0.5, draw(units, out) / units**0.5


@pytest.mark.spec("multi-head-latent-moe", "6.3")
@pytest.mark.parametrize("tile", [1, 7, 50, 256])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0])
def test_equals_the_net(tile, scale):
    x, keys, values = case(scale=scale)
    assert (ffn_as_attention(x, keys, values, tile=tile) - F.gelu(x @ keys.t()) @ values).abs().max() < 1e-5


@pytest.mark.spec("multi-head-latent-moe", "6.3")
def test_one_plus_gelu_is_positive():
    s = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    raised = 1 + F.gelu(s)
    assert (raised > 0).all()
    lowest = raised.argmin()
    assert float(raised[lowest]) == pytest.approx(1 - 0.16997, abs=1e-5)
    assert float(s[lowest]) == pytest.approx(-0.7518, abs=1e-3)


def test_is_the_softmax_attention_that_it_says():
    x, keys, values = case(dtype=torch.float64)
    mean, lse = attention_of_ffn(x, keys, values, 7)
    scores = torch.log1p(F.gelu(x @ keys.t()))
    torch.testing.assert_close(mean, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.spec("multi-head-latent-moe", "6.3")
def test_gradients():
    x, keys, values = (t.requires_grad_() for t in case(6, 5, 3, 4, torch.float64))
    assert torch.autograd.gradcheck(lambda *leaves: ffn_as_attention(*leaves, tile=2), (x, keys, values))


def test_spans_see_their_own_expert(monkeypatch):
    monkeypatch.setattr("moesaic.experts.ffn_attention.TILE_ROWS", 4)
    x, _, _ = case(12, dtype=torch.float64)
    keys, values = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, keys, values)]
    y = spans_as_attention(*leaves, [(2, 0, 9), (0, 10, 12)], tile=3)
    expected = torch.zeros(12, 6, dtype=torch.float64)
    expected[:9] = F.gelu(x[:9] @ keys[2].t()) @ values[2]
    expected[10:] = F.gelu(x[10:] @ keys[0].t()) @ values[0]
    torch.testing.assert_close(y, expected)
    found, wanted = (torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert not found[1][1].any()


def test_keeps_no_hidden_activation():
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    x, keys, values = (t.requires_grad_() for t in case(100, 60))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ffn_as_attention(x, keys, values)
    assert sorted(sizes) == sorted([x.numel(), keys.numel(), values.numel()])


def test_bad_input():
    x, keys, values = case()
    with pytest.raises(ValueError, match=r"\(N, C\)"):
        ffn_as_attention(x[:, 1:], keys, values)
    with pytest.raises(ValueError, match=r"\(F, O\)"):
        ffn_as_attention(x, keys, values[1:])
    with pytest.raises(ValueError, match="tile"):
        ffn_as_attention(x, keys, values, tile=0)
