"""Sub-tokens packed into blocks and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.experts.packing import pack_tokens


@pytest.mark.spec("multi-head-latent-moe", "6.4")
@given(
    heads=st.integers(1, 3),
    rows=st.integers(0, 9),
    slots=st.integers(1, 3),
    experts=st.integers(1, 5),
    block=st.sampled_from([1, 4, 128]),
    data=st.data(),
)
def test_unpacking_what_was_packed_is_the_identity(heads, rows, slots, experts, block, data):
    size = heads * rows * slots
    ids = data.draw(st.lists(st.integers(0, experts), min_size=size, max_size=size))
    check(torch.tensor(ids, dtype=torch.int64).view(heads, rows, slots), experts, block)


@pytest.mark.spec("multi-head-latent-moe", "6.4")
@pytest.mark.parametrize("block", [1, 4, 128])
def test_one_expert_takes_all_and_others_stay_empty(block):
    ids_HTK = torch.stack([torch.full((70, 2), 3), torch.arange(140).view(70, 2) % 5])
    packing = check(ids_HTK, 5, block)
    assert (packing.block_expert_HB[0, : -(-140 // block)] == 3).all()


def check(ids_HTK, experts, block):
    heads, rows, slots = ids_HTK.shape
    packing = pack_tokens(ids_HTK, experts, block)
    length = packing.source_HP.shape[1]
    assert packing.block_expert_HB.shape == (heads, length // block) and length % block == 0
    x_HTC = 1.0 + torch.arange(heads * rows * 2, dtype=torch.float64).view(heads, rows, 2)
    x_HPC = packing.pack(x_HTC)
    assert x_HPC.shape == (heads, length, 2)
    filled_HTK1 = (ids_HTK < experts)[..., None]
    expected = x_HTC[:, :, None].expand(-1, -1, slots, -1) * filled_HTK1
    assert torch.equal(packing.unpack(x_HPC), expected)
    # Each row stands in a block of its own expert, once a slot; padding is zero.
    expert_HP = packing.block_expert_HB.repeat_interleave(block, 1)
    found = packing.unpack(expert_HP[..., None].double())[..., 0]
    assert torch.equal(found, torch.where(filled_HTK1[..., 0], ids_HTK, 0).double())
    assert int((x_HPC[..., 0] != 0).sum()) == int(filled_HTK1.sum())
    return packing


def test_order_inside_an_expert_is_that_of_the_rows():
    ids_HTK = torch.tensor([[[1], [0], [1], [0], [1]]])
    assert pack_tokens(ids_HTK, 2, 4).source_HP.tolist() == [[1, 3, 5, 5, 0, 2, 4, 5]]


@pytest.mark.parametrize(
    ("ids", "block", "match"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), 4, r"\(H, T, K\)"),
        (torch.zeros(1, 2, 3), 4, "int64"),
        (torch.full((1, 2, 3), 6), 4, r"0\.\.5"),
        (torch.full((1, 2, 3), -1), 4, r"got -1"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), 0, "block_size"),
    ],
)
def test_bad_input(ids, block, match):
    with pytest.raises(ValueError, match=match):
        pack_tokens(ids, 5, block)
