"""Muon: orthogonal directions, batches, stacked experts, reuse of a direction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.training.muon import Muon, orthogonalize, warmed_momentum


def exact(matrix: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4), (3, 5, 9)])
def test_singular_values_go_to_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rough = torch.linalg.svdvals(orthogonalize(matrices, 5))
    assert rough.min() > 0.7
    assert rough.max() < 1.3
    torch.testing.assert_close(orthogonalize(matrices, 8), exact(matrices), atol=1e-3, rtol=0)


def test_gram_side_equals_iterating_on_the_matrix():
    from moesaic.training.muon import _POLAR_EXPRESS

    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = x / (torch.linalg.matrix_norm(x) * 1.02 + 1e-7)
    for a, b, c in _POLAR_EXPRESS[:4]:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    torch.testing.assert_close(orthogonalize(x, 4), y)


def test_zero_matrices_and_zero_rows_stay_zero():
    matrices = torch.randn(2, 6, 4)
    matrices[0] = 0
    matrices[1, 2:4] = 0
    out = orthogonalize(matrices)
    assert torch.equal(out[0], torch.zeros(6, 4))
    assert torch.equal(out[1, 2:4], torch.zeros(2, 4))


def one_step(parameter, grad, **options):
    parameter = nn.Parameter(parameter.clone())
    parameter.grad = grad
    Muon([{"params": [parameter], **options}], lr=0.1, momentum=0.0).step()
    return parameter.detach()


def test_step_is_the_polar_factor_scaled_for_the_shape():
    w, g = torch.zeros(12, 3), torch.randn(12, 3)
    assert torch.allclose(one_step(w, g), -0.1 * 2.0 * orthogonalize(g), atol=1e-6)
    assert torch.allclose(one_step(w.T, g.T), -0.1 * orthogonalize(g.T), atol=1e-6)
    assert torch.allclose(one_step(w, g, transposed=True), -0.1 * orthogonalize(g), atol=1e-6)


def test_experts_are_a_batch_of_matrices():
    w, g = torch.zeros(3, 5, 4), torch.randn(3, 5, 4)
    together = one_step(w, g)
    for expert in range(3):
        assert torch.allclose(together[expert], one_step(w[expert], g[expert]), atol=1e-6)


@pytest.mark.parametrize(("axis", "shape"), [(1, (3, 5, 4)), (2, (3, 4, 5))])
def test_stacked_experts_are_one_matrix_with_the_mean_size_of_their_own(axis, shape):
    w, g = torch.zeros(shape), torch.randn(shape)
    step = one_step(w, g, stack=axis)
    whole = torch.cat(list(g), dim=axis - 1)
    expected = orthogonalize(whole)
    back = torch.stack(expected.split(5, dim=axis - 1))
    ratio = step / back
    assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), atol=1e-4)
    assert step.norm() == pytest.approx(one_step(w, g).norm().item(), rel=0.2)


def test_a_direction_is_reused_between():
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = Muon([parameter], lr=1.0, momentum=0.0, every=2)
    steps = []
    for _ in range(4):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(4, 4)
        optimizer.step()
        steps.append(parameter.detach() - before)
    assert torch.allclose(steps[0], steps[1], atol=1e-6)
    assert torch.allclose(steps[2], steps[3], atol=1e-6)
    assert not torch.allclose(steps[1], steps[2], atol=1e-2)


def test_decay_momentum_and_parameters_without_gradient():
    moved, still = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    moved.grad = torch.zeros(3, 3)
    Muon([moved, still], lr=0.5, weight_decay=0.2).step()
    assert torch.allclose(moved, torch.full((3, 3), 0.9))
    assert torch.equal(still.detach(), torch.ones(3, 3))
    assert [warmed_momentum(0.95, 10, step) for step in (0, 5, 10)] == [0.85, pytest.approx(0.90), 0.95]


def test_refusals():
    with pytest.raises(ValueError, match="moves matrices"):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"stack=1 needs a parameter \(E, A, B\)"):
        Muon([{"params": [nn.Parameter(torch.ones(3, 3))], "stack": 1}])
    for options in ({"iterations": 0}, {"momentum": 1.0}, {"every": 0}):
        with pytest.raises(ValueError, match=r"must|at least"):
            Muon([nn.Parameter(torch.ones(3, 3))], **options)
