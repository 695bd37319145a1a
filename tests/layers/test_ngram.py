"""Hashed n-gram embeddings: windows, padding, continuation, sparse gradients."""

from __future__ import annotations

import pytest
import torch

from moesaic.layers.ngram import NgramEmbedding


@pytest.fixture
def layer():
    layer = NgramEmbedding(4, (2, 3, 5), rows=1009)
    with torch.no_grad():
        layer.table_RD.normal_(generator=torch.Generator().manual_seed(0))
    return layer


def draw(*shape, seed=1):
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(seed))


def test_depends_on_the_last_five_tokens_only(layer):
    ids = draw(1, 12)
    out = layer(ids)
    changed = ids.clone()
    changed[0, 3] = (changed[0, 3] + 7) % 60
    moved = (layer(changed) != out).any(-1)[0]
    assert moved.tolist() == [3 <= place <= 7 for place in range(12)]


def test_equal_ngrams_get_equal_rows(layer):
    ids = draw(1, 6).repeat(1, 3)
    out = layer(ids)
    assert torch.equal(out[0, 6:12], out[0, 12:18])


@pytest.mark.parametrize("cut", [1, 2, 4, 7, 11])
def test_continuation_equals_the_whole(layer, cut):
    ids = draw(3, 12)
    whole = layer(ids)
    assert torch.equal(layer(ids[:, cut:], past_BP=ids[:, :cut]), whole[:, cut:])


def test_left_padding_changes_nothing(layer):
    ids = draw(1, 5)
    padded = torch.cat([draw(1, 4, seed=9), ids], dim=1)
    mask = torch.tensor([[False] * 4 + [True] * 5])
    assert torch.equal(layer(padded, mask_BS=mask)[:, 4:], layer(ids))
    one_by_one = layer(ids[:, 2:], past_BP=torch.where(mask, padded, -1)[:, :6])
    assert torch.equal(one_by_one, layer(ids)[:, 2:])


def test_gradient_is_sparse_and_right(layer):
    ids = draw(2, 9)
    weight = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(2))
    (layer(ids) * weight).sum().backward()
    grad = layer.table_RD.grad
    assert grad.is_sparse
    # The layer is linear in its table, so the directional derivative is a difference, exactly.
    step = torch.randn(layer.table_RD.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    layer.double()
    with torch.no_grad():
        before = (layer(ids) * weight).sum()
        layer.table_RD += step
        after = (layer(ids) * weight).sum()
    assert (after - before).item() == pytest.approx((grad.to_dense().double() * step).sum().item(), rel=1e-5)


def test_rows_are_spread(layer):
    wide = NgramEmbedding(1, (3,), rows=4096)
    ids = torch.cartesian_prod(*[torch.arange(16)] * 3)  # all 4096 trigrams over 16 tokens
    with torch.no_grad():
        wide.table_RD.copy_(torch.arange(4096.0)[:, None])
    used = wide(ids)[:, 2, 0].unique().numel()
    assert used > 4096 * 0.55  # a random hash fills 1 - 1/e = 63 %


@pytest.mark.parametrize("orders", [(), (1,), (2, 2), (9,)])
def test_bad_orders_are_refused(orders):
    with pytest.raises(ValueError, match="orders"):
        NgramEmbedding(4, orders, 10)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="rows"):
        NgramEmbedding(4, (2,), 0)
