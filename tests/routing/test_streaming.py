"""Routing that never forms the scores: equal to the dense one, with its gradient, in less memory."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.routing.float_keys import float_to_key, key_to_float, pack, unpack_ids
from moesaic.routing.streaming import streaming_top_k


def case(heads=2, rows=50, experts=37, width=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    return draw(heads, rows, width), draw(heads, experts, width), draw(heads, experts)


def dense(x_HTC, keys_HEC, top_k, bias_HE=None):
    scores = x_HTC @ keys_HEC.transpose(1, 2)
    biased = scores if bias_HE is None else scores + bias_HE[:, None]
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return scores.gather(2, ids), ids


@pytest.mark.spec("multi-head-latent-moe", "6.1")
@pytest.mark.parametrize("tile", [1, 5, 16, 37, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_dense_top_k(tile, dtype, with_bias):
    x, keys, bias = case(dtype=dtype)
    bias = bias if with_bias else None
    x.requires_grad_(), keys.requires_grad_()
    grad = torch.randn(2, 50, 4, dtype=dtype, generator=torch.Generator().manual_seed(9))
    values, ids = streaming_top_k(x, keys, 4, bias, tile=tile)
    found = torch.autograd.grad((values * grad).sum(), (x, keys))
    expected_values, expected_ids = dense(x, keys, 4, bias)
    expected = torch.autograd.grad((expected_values * grad).sum(), (x, keys))
    assert torch.equal(ids, expected_ids)
    assert (values - expected_values).abs().max() < 1e-6
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.spec("multi-head-latent-moe", "6.1")
def test_gradcheck():
    x, keys, bias = case(2, 4, 7, 3, torch.float64)
    leaves = (x.requires_grad_(), keys.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, keys: streaming_top_k(x, keys, 3, bias, tile=2)[0], leaves)


@pytest.mark.spec("multi-head-latent-moe", "6.1")
@pytest.mark.parametrize("tile", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_index(tile, dtype):
    keys = torch.tensor([[[0.0], [1], [0], [1], [1], [-0.0], [2], [1]]], dtype=dtype)
    x = torch.tensor([[[1.0], [0], [-1]]], dtype=dtype)
    _, ids = streaming_top_k(x, keys, 4, tile=tile)
    assert ids.tolist() == [[[6, 1, 3, 4], [0, 1, 2, 3], [0, 2, 5, 1]]]


@pytest.mark.spec("multi-head-latent-moe", "6.9")
def test_values_are_clean_and_a_common_bias_changes_nothing():
    x, keys, bias = case()
    values, ids = streaming_top_k(x, keys, 5, 100 * bias)
    torch.testing.assert_close(values, (x @ keys.transpose(1, 2)).gather(2, ids), rtol=0, atol=1e-6)
    for shift in (-0.5, 0.25, 3.0):
        assert torch.equal(streaming_top_k(x, keys, 5, torch.full_like(bias, shift))[1], streaming_top_k(x, keys, 5)[1])


def test_rows_beyond_one_block(monkeypatch):
    monkeypatch.setattr("moesaic.routing.streaming.TILE_ROWS", 7)
    x, keys, bias = case()
    assert torch.equal(streaming_top_k(x, keys, 3, bias, tile=8)[1], dense(x, keys, 3, bias)[1])
    values, ids = streaming_top_k(x[:, :0], keys, 3)
    assert values.shape == ids.shape == (2, 0, 3)


def test_keeps_no_scores_for_the_backward():
    def kept(function):
        total = {}

        def note(tensor):
            total[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = function()
        return sum(total.values()), out

    x, keys, _ = case(1, 256, 512, 4)
    x.requires_grad_()
    inputs = (x.numel() + keys.numel()) * 4
    streaming, _ = kept(lambda: streaming_top_k(x, keys, 4)[0].softmax(-1))
    full, _ = kept(lambda: (x @ keys.transpose(1, 2)).softmax(-1).topk(4, -1)[0])
    assert streaming <= inputs + 256 * 4 * 8
    assert full >= 256 * 512 * 4
    assert (full - inputs) > 16 * (streaming - inputs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_k": 38}, "top_k must be between 1 and the 37"),
        ({"top_k": 0}, "top_k"),
        ({"tile": 0}, "tile"),
        ({"bias_HE": torch.zeros(2, 3)}, "bias_HE"),
        ({"x_HTC": torch.zeros(2, 5, 7)}, "width"),
        ({"x_HTC": torch.zeros(3, 5, 6)}, r"\(H, T, C\)"),
        ({"x_HTC": torch.zeros(2, 5, 6, dtype=torch.bfloat16)}, "float32"),
    ],
)
def test_bad_input(change, match):
    x, keys, _ = case()
    with pytest.raises(ValueError, match=match):
        streaming_top_k(**({"x_HTC": x, "keys_HEC": keys, "top_k": 3} | change))


SPECIAL = [-math.inf, math.inf, 0.0, -0.0, 1e-45, -1e-45, 1.17549435e-38, -1.17549435e-38, 3.4028235e38, -3.4028235e38]


@pytest.mark.spec("multi-head-latent-moe", "6.2")
@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False)), min_size=2, max_size=50))
def test_keys_order_as_floats_and_turn_back_bit_for_bit(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    keys = float_to_key(values)
    assert torch.equal(key_to_float(keys).view(torch.int32), values.view(torch.int32))
    for a, key_a in zip(values.tolist(), keys.tolist(), strict=True):
        for b, key_b in zip(values.tolist(), keys.tolist(), strict=True):
            if a != b:
                assert (a < b) == (key_a < key_b)
            else:  # only the two zeros are equal with other bits: -0.0 just below +0.0
                assert (key_a < key_b) == (struct.pack("f", a) != struct.pack("f", b) and math.copysign(1, a) < 0)


@pytest.mark.spec("multi-head-latent-moe", "6.2")
def test_packed_pairs_order_by_value_then_lower_id():
    values = torch.tensor([1.0, -2.0, 1.0, -0.0, 0.0, math.inf, -math.inf, 1.0])
    ids = torch.arange(8) * (2**31 // 9)
    packed = pack(values, ids)
    assert torch.equal(unpack_ids(packed), ids)
    order = packed.argsort(descending=True).tolist()
    assert order == [5, 0, 2, 7, 3, 4, 1, 6]
    with pytest.raises(ValueError, match="float32"):
        float_to_key(torch.zeros(2, dtype=torch.float64))
