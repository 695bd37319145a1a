"""Muon: orthogonal directions, batches, stacked experts, reuse of a direction.

Inputs have known singular values and are float64: what the iteration makes of a singular value is its polynomial, and
rounding grows at most by the polynomial's slope at zero, the product of the leading coefficients.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moesaic.training.muon import _POLAR_EXPRESS, Muon, orthogonalize, warmed_momentum

SLOPE = math.prod(a for a, _, _ in _POLAR_EXPRESS)
ROUNDING = 100 * SLOPE * torch.finfo(torch.float64).eps  # of a product of matrices up to a hundred numbers wide


def matrix(singular: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U (rows, r) and V (columns, r) with orthonormal columns, and U diag(singular) V^T."""
    u, _ = torch.linalg.qr(torch.randn(rows, len(singular), dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, len(singular), dtype=torch.float64))
    return u, v, (u * singular) @ v.T


def spread(count: int) -> torch.Tensor:
    return torch.linspace(0.1, 1.0, count, dtype=torch.float64)


def polynomial(singular: torch.Tensor, iterations: int) -> torch.Tensor:
    """What the iterations make of singular values, after division by the Frobenius norm."""
    s = singular / (singular.norm() * 1.02 + 1e-7)
    for a, b, c in _POLAR_EXPRESS[:iterations]:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 12), (12, 4), (5, 9)])
@pytest.mark.parametrize("iterations", range(1, 9))
def test_singular_values_go_through_the_polynomial_and_vectors_stay(rows, columns, iterations):
    singular = spread(min(rows, columns))
    u, v, x = matrix(singular, rows, columns)
    expected = (u * polynomial(singular, iterations)) @ v.T
    torch.testing.assert_close(orthogonalize(x, iterations), expected, atol=ROUNDING, rtol=0)
    both = orthogonalize(torch.stack([x, 3 * x]), iterations)  # each of a batch is divided by its own norm
    larger = (u * polynomial(3 * singular, iterations)) @ v.T
    torch.testing.assert_close(both, torch.stack([expected, larger]), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("iterations", "error"), [(5, 0.15), (8, 1e-9)])
def test_the_polynomial_goes_to_one_on_all_singular_values_from_a_thousandth_on(iterations, error):
    s = torch.logspace(-3, 0, 2000, dtype=torch.float64)
    for a, b, c in _POLAR_EXPRESS[:iterations]:
        s = a * s + b * s**3 + c * s**5
    assert float((s - 1).abs().max()) <= error


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


def close(first, second):
    torch.testing.assert_close(first, second, atol=ROUNDING, rtol=0)


def test_step_is_the_polar_factor_scaled_for_the_shape():
    w = torch.zeros(12, 3, dtype=torch.float64)
    g = matrix(spread(3), 12, 3)[2]
    close(one_step(w, g), -0.1 * 2.0 * orthogonalize(g))
    close(one_step(w.T, g.T), -0.1 * orthogonalize(g.T))
    close(one_step(w, g, transposed=True), -0.1 * orthogonalize(g))


def test_experts_are_a_batch_of_matrices():
    w = torch.zeros(3, 5, 4, dtype=torch.float64)
    g = torch.stack([matrix(spread(4), 5, 4)[2] for _ in range(3)])
    together = one_step(w, g)
    for expert in range(3):
        close(together[expert], one_step(w[expert], g[expert]))


@pytest.mark.parametrize(("axis", "shape"), [(1, (3, 5, 4)), (2, (3, 4, 5))])
def test_stacked_experts_are_one_matrix_with_the_mean_size_of_their_own(axis, shape):
    """Joined along their width they are one matrix of known singular values; the step is its polar factor."""
    whole = matrix(spread(4), 15, 4)[2] if axis == 1 else matrix(spread(4), 4, 15)[2]
    g = torch.stack(whole.split(5, dim=axis - 1))
    step = one_step(torch.zeros(shape, dtype=torch.float64), g, stack=axis)
    back = torch.stack(orthogonalize(whole).split(5, dim=axis - 1))
    factor = -0.1 * math.sqrt(3) * (math.sqrt(5 / 4) if axis == 1 else 1.0)  # sqrt(E), and out / in of one expert
    close(step, factor * back)
    # An orthogonal expert of its own would have 4 singular values of 1; so has each here, on average.
    mean = step.norm() / (0.1 * (math.sqrt(5 / 4) if axis == 1 else 1.0) * math.sqrt(3 * 4))
    torch.testing.assert_close(mean, polynomial(spread(4), 5).square().mean().sqrt(), atol=ROUNDING, rtol=0)


def test_a_direction_is_reused_between():
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = Muon([parameter], lr=1.0, momentum=0.0, every=2)
    steps, gradients = [], [matrix(spread(4), 4, 4)[2] for _ in range(4)]
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        steps.append(parameter.detach() - before)
    for step, used in zip(steps, (0, 0, 2, 2)):
        close(step, -orthogonalize(gradients[used]))


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
