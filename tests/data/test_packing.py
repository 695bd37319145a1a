"""Windows: every token once an epoch, order from seed and number alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data.packing import PackedTokens


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_visits_every_window_once(tokens, length, size, seed):
    if tokens < length + 1:
        return
    packed = PackedTokens(torch.arange(tokens), seed=seed)
    windows = packed.windows(length)
    firsts = []
    number = 0
    while len(firsts) < windows:
        batch = packed.batch(number, size, length)
        assert batch.inputs_BS.shape == batch.targets_BS.shape == (size, length)
        assert torch.equal(batch.targets_BS, batch.inputs_BS + 1)
        firsts += batch.inputs_BS[:, 0].tolist()
        number += 1
    epoch = sorted(firsts[:windows])
    assert len(set(epoch)) == windows
    assert {(first - epoch[0]) % length for first in epoch} == {0}


def test_order_depends_on_seed_stage_and_number_alone():
    tokens = np.arange(5000)
    one, two = PackedTokens(tokens, seed=3), PackedTokens(tokens, seed=3)
    for number in range(40):
        one.batch(number, 4, 32)
    for number in (39, 7, 25):
        assert torch.equal(one.batch(number, 4, 32).inputs_BS, two.batch(number, 4, 32).inputs_BS)
    assert not torch.equal(one.batch(0, 4, 32).inputs_BS, PackedTokens(tokens, seed=4).batch(0, 4, 32).inputs_BS)
    assert not torch.equal(one.batch(0, 4, 32).inputs_BS, one.batch(0, 4, 32, stage=1).inputs_BS)


def test_each_epoch_starts_elsewhere():
    packed = PackedTokens(np.arange(1000), seed=0)
    windows = packed.windows(50)
    offsets = {int(packed.batch(epoch * windows, 1, 50).inputs_BS[0, 0]) % 50 for epoch in range(10)}
    assert len(offsets) > 3


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="has 10 tokens, a window of length 10 needs 11"):
        PackedTokens(np.arange(10)).batch(0, 1, 10)
    with pytest.raises(ValueError, match=r"shape \(N,\)"):
        PackedTokens(np.zeros((2, 2), dtype=np.int64))
