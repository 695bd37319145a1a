"""Rotary positions: a rotation, relative, differentiable."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from moesaic.layers.rotary import rotary_angles, rotate


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_position_zero_is_the_identity_and_lengths_stay():
    x = vectors(1, 2, 5, 8)
    cos, sin = rotary_angles(torch.arange(5)[None], 8, 100.0)
    y = rotate(x, cos, sin)
    assert torch.equal(y[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_scores_depend_on_the_distance_only():
    q, k = vectors(1, 1, 1, 8), vectors(1, 1, 1, 8, seed=1)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [rotate(x, *rotary_angles(torch.tensor([[at]]), 8, 50.0)) for x, at in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score(7, 3), score(7, 2))


def test_the_layout_is_that_of_transformers():
    x = vectors(2, 3, 6, 8, dtype=torch.float32)
    position_BS = torch.tensor([[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14]])
    cos, sin = rotary_angles(position_BS, 8, 10000.0)
    theirs, _ = apply_rotary_pos_emb(x, x, torch.cat([cos, cos], -1)[:, 0], torch.cat([sin, sin], -1)[:, 0])
    torch.testing.assert_close(rotate(x, cos, sin), theirs)


def test_gradient():
    cos, sin = (part.double() for part in rotary_angles(torch.arange(3)[None], 4, 10.0))
    x = vectors(1, 2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)
    # Also for a view that is not contiguous, as attention hands it over.
    y = vectors(1, 3, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: rotate(y.transpose(1, 2), cos, sin), y)
