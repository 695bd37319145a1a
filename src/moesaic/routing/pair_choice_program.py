"""Routing as a linear program over row-expert pairs, solved in closed form (USMoE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MODES = ("pairs", "token", "expert")


def routing_program(scores_LE: Tensor, budget: float, mode: str = "pairs") -> tuple[Tensor, float]:
    r"""The optimum of the routing program of USMoE, arXiv:2503.22996, without a solver.

    .. math:: \max_x \sum_{i,j} S_{ij} x_{ij}, \qquad 0 \le x_{ij} \le 1,

    under one of three budgets of B pairs: ``"token"`` gives each of the L rows B / L (top-k for k = B / L),
    ``"expert"`` each of the E experts B / E (expert choice), ``"pairs"`` fixes the total alone. The last set contains
    the other two, so its optimum is at least as large as theirs. Each is reached by taking the largest scores of the
    row, of the expert, or of all: as many as the budget holds, and the next one in part where it is fractional.

    Args:
        scores_LE: S, (L, E), finite; of one group of rows.
        budget: B in (0, L E].
        mode: one of the three above.

    Returns:
        x (L, E) float64, 1 where a pair is taken, and the objective. Ties go to the lower (flat) index.

    Raises:
        ValueError: an unknown mode, scores that are not finite or have another shape, a budget out of range.
    """
    scores_LE = _checked(scores_LE, budget, mode)
    if mode == "pairs":
        shares_LE = _take_best(scores_LE.reshape(1, -1), budget).view_as(scores_LE)
    elif mode == "token":
        shares_LE = _take_best(scores_LE, budget / scores_LE.shape[0])
    else:
        shares_LE = _take_best(scores_LE.T, budget / scores_LE.shape[1]).T
    return shares_LE, float((shares_LE * scores_LE).sum())


def routing_program_by_solver(scores_LE: Tensor, budget: float, mode: str = "pairs") -> tuple[Tensor, float]:
    """:func:`routing_program` by a general solver (HiGHS in scipy), to check the closed forms against.

    Args:
        scores_LE: see :func:`routing_program`.
        budget: see there.
        mode: see there.

    Raises:
        ImportError: scipy is not installed.
        ValueError: see :func:`routing_program`.
        RuntimeError: the solver found no optimum.
    """
    scores_LE = _checked(scores_LE, budget, mode)
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ImportError('the solver needs scipy: pip install "moesaic[tabular]"') from error
    rows, experts = scores_LE.shape
    identity_L, identity_E = torch.eye(rows, dtype=torch.float64), torch.eye(experts, dtype=torch.float64)
    if mode == "pairs":
        sums, bounds = torch.ones((1, rows * experts), dtype=torch.float64), [budget]
    elif mode == "token":
        sums, bounds = torch.kron(identity_L, torch.ones((1, experts), dtype=torch.float64)), [budget / rows] * rows
    else:
        sums, bounds = torch.kron(torch.ones((1, rows), dtype=torch.float64), identity_E), [budget / experts] * experts
    found = linprog(-scores_LE.flatten().numpy(), A_eq=sums.numpy(), b_eq=bounds, bounds=(0, 1), method="highs")
    if not found.success:
        raise RuntimeError(f"the solver found no optimum: {found.message}")
    return torch.from_numpy(found.x).view(rows, experts), -float(found.fun)


def _checked(scores_LE: Tensor, budget: float, mode: str) -> Tensor:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if scores_LE.dim() != 2 or not scores_LE.numel():
        raise ValueError(f"scores_LE must have shape (L, E) with at least one row, got {tuple(scores_LE.shape)}")
    if not 0 < budget <= scores_LE.numel():
        raise ValueError(f"budget must lie in (0, L * E = {scores_LE.numel()}], got {budget}")
    scores_LE = scores_LE.detach().double().cpu()
    if not bool(torch.isfinite(scores_LE).all()):
        raise ValueError("scores_LE is not finite")
    return scores_LE


def _take_best(scores_UN: Tensor, each: float) -> Tensor:
    """Shares in [0, 1] that sum to ``each`` in every row, on its largest entries."""
    whole = math.floor(each + 1e-9)
    part = max(each - whole, 0.0)
    order_UN = torch.sort(scores_UN, dim=1, descending=True, stable=True).indices
    shares = torch.zeros(scores_UN.shape[1], dtype=torch.float64)
    shares[:whole] = 1.0
    if part > 1e-9:
        shares[whole] = part
    return torch.zeros_like(scores_UN).scatter(1, order_UN, shares.expand_as(scores_UN))
