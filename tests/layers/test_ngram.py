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


@pytest.fixture
def vocabulary():
    """A layer that knows the n-grams of a text which occur twice or more."""
    layer = NgramEmbedding(4, (3, 2), rows=50, min_count=2)
    layer.fit(torch.tensor([1, 2, 3, 1, 2, 3, 4, 5, 4, 6]))  # twice: 12, 23, 123; all others once
    with torch.no_grad():
        layer.table_RD.normal_(generator=torch.Generator().manual_seed(0))
    return layer


def test_only_the_vocabulary_speaks(vocabulary):
    known = [(key < 2**63 - 1).sum().item() for key in vocabulary.key_OR]
    assert known == [1, 2]
    out = vocabulary(torch.tensor([[1, 2, 3, 4, 5, 7]]))[0]
    assert (out != 0).any(-1).tolist() == [False, True, True, False, False, False]
    table = vocabulary.table_RD.view(2, 50, 4)
    two = out[1]  # 12: a bigram's row alone
    assert any(torch.equal(two, row) for row in table[1, :2])
    three = out[2]  # 123 and 23
    assert any(torch.allclose(three, table[0, 0] + row) for row in table[1, :2])


def test_the_most_frequent_have_the_rows():
    layer = NgramEmbedding(1, (2,), rows=1, min_count=1)
    layer.fit(torch.tensor([5, 6, 5, 6, 5, 6, 7, 8, 7, 8]))  # 56 thrice
    with torch.no_grad():
        layer.table_RD.fill_(1.0)
    assert layer(torch.tensor([[5, 6, 7, 8]]))[0, :, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_vocabulary_continues_and_ignores_padding(vocabulary, cut):
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4, 2, 3], [2, 3, 1, 2, 1, 2, 3, 3, 3]])
    whole = vocabulary(ids)
    assert torch.equal(vocabulary(ids[:, cut:], past_BP=ids[:, :cut]), whole[:, cut:])
    mask = torch.tensor([[False] * 3 + [True] * 9] * 2)
    padded = torch.cat([ids[:, :3], ids], dim=1)
    assert torch.equal(vocabulary(padded, mask_BS=mask)[:, 3:], whole)


def test_gradient_of_a_vocabulary_is_sparse_and_touches_known_rows(vocabulary):
    vocabulary(torch.tensor([[1, 2, 3, 9, 9]])).sum().backward()
    grad = vocabulary.table_RD.grad
    assert grad.is_sparse
    assert (grad.to_dense() != 0).any(-1).sum() == 3
    assert torch.equal(grad.to_dense().sum(), torch.tensor(12.0))


def test_a_vocabulary_survives_bf16_and_state_dict(vocabulary):
    other = NgramEmbedding(4, (3, 2), rows=50, min_count=2)
    other.load_state_dict(vocabulary.state_dict())
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    assert torch.equal(other(ids), vocabulary(ids))
    assert vocabulary.to(torch.bfloat16).key_OR.dtype == torch.int64


def test_bad_vocabularies_are_refused(vocabulary, layer):
    with pytest.raises(ValueError, match="min_count"):
        NgramEmbedding(4, (2,), rows=5, min_count=0)
    with pytest.raises(ValueError, match="hashed"):
        layer.fit(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"\(N,\)"):
        vocabulary.fit(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("orders", [(), (1,), (2, 2), (9,)])
def test_bad_orders_are_refused(orders):
    with pytest.raises(ValueError, match="orders"):
        NgramEmbedding(4, orders, 10)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="rows"):
        NgramEmbedding(4, (2,), 0)
