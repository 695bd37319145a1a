"""The causal convolution: its formula, its start, continuing where an earlier call ended."""

from __future__ import annotations

import pytest
import torch

from moesaic.layers.shift import CausalShift


def shifted(dim: int = 5, places: int = 3, seed: int = 0) -> CausalShift:
    shift = CausalShift(dim, places).double()
    shift.weight_JD.data.normal_(generator=torch.Generator().manual_seed(seed))
    return shift


def rows(batch: int, length: int, dim: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_starts_as_the_identity():
    x = rows(2, 4)
    assert torch.equal(CausalShift(5, 2).double()(x), x)


def test_equals_the_formula_and_its_gradient():
    shift, x = shifted(), rows(2, 7).requires_grad_()
    expected = torch.stack(
        [
            x[:, t] + sum(shift.weight_JD[j - 1] * x[:, t - j] for j in range(1, 4) if t - j >= 0)
            for t in range(x.shape[1])
        ],
        dim=1,
    )
    torch.testing.assert_close(shift(x), expected)
    assert torch.autograd.gradcheck(shift, x)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_continues_where_an_earlier_call_ended(cut):
    shift, x = shifted(), rows(2, 10)
    past = x[:, :cut]
    torch.testing.assert_close(shift(x[:, cut:], past), shift(x)[:, cut:])


def test_token_by_token_equals_the_whole():
    shift, x = shifted(), rows(1, 6)
    single = [shift(x[:, t : t + 1], x[:, :t] if t else None) for t in range(6)]
    torch.testing.assert_close(torch.cat(single, dim=1), shift(x))


def test_does_not_see_the_future():
    shift, x = shifted(), rows(1, 8)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(shift(changed)[:, :5], shift(x)[:, :5])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="places must be at least 1, got 0"):
        CausalShift(4, 0)
