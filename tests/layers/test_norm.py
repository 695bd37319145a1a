"""Norms against their formula."""

from __future__ import annotations

import pytest
import torch

from moesaic.layers.norm import KINDS, Norm


def formula(x: torch.Tensor, kind: str, eps: float) -> torch.Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [True, False])
def test_equals_the_formula_with_its_gradient(kind, scale):
    torch.manual_seed(0)
    norm = Norm(6, kind, 1e-5, scale=scale).double()
    if scale:
        norm.weight.data.normal_()
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    expected = formula(x, kind, 1e-5) * (norm.weight if scale else 1.0)
    torch.testing.assert_close(norm(x), expected)
    assert torch.autograd.gradcheck(norm, x)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_float32_in_bf16(kind):
    # In bf16 the mean of squares of 4,096 equal numbers would stop growing long before the end of the sum.
    x = torch.full((1, 4096), 3.0)
    x[0, ::2] = -3.0
    y = Norm(4096, kind).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x / 3, atol=4e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_of_the_input_does_not_matter(kind):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    norm = Norm(16, kind, eps=1e-12)
    torch.testing.assert_close(norm(1e3 * x), norm(x))


def test_zero_rows_have_finite_gradients():
    for kind in KINDS:
        x = torch.zeros(2, 4, requires_grad=True)
        Norm(4, kind)(x).sum().backward()
        assert torch.isfinite(x.grad).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"norm must be one of .*'batch'"):
        Norm(4, "batch")
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        Norm(0)
