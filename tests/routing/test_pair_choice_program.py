"""The routing program: worked examples, its closed forms against a solver, dominance of the pair budget."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.routing import routing_program, routing_program_by_solver

FIRST = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.45, 0.05]])
SECOND = torch.tensor([[0.9, 0.8, 0.0], [0.3, 0.2, 0.1]])


def taken(shares: Tensor) -> list[tuple[int, int]]:
    assert bool(((shares == 0) | (shares == 1)).all())
    return [(row, expert) for row, expert in shares.nonzero().tolist()]


@pytest.mark.spec("usmoe", "6.1")
def test_worked_examples() -> None:
    shares, objective = routing_program(FIRST, 2)
    assert taken(shares) == [(0, 0), (1, 0)] and objective == pytest.approx(1.1)
    shares, objective = routing_program(FIRST, 2, "token")
    assert taken(shares) == [(0, 0), (1, 0)] and objective == pytest.approx(1.1)
    shares, objective = routing_program(FIRST, 3)
    assert taken(shares) == [(0, 0), (1, 0), (1, 1)] and objective == pytest.approx(1.55)
    shares, objective = routing_program(SECOND, 2)
    assert taken(shares) == [(0, 0), (0, 1)] and objective == pytest.approx(1.7)
    shares, objective = routing_program(SECOND, 2, "token")
    assert taken(shares) == [(0, 0), (1, 0)] and objective == pytest.approx(1.2)
    shares, objective = routing_program(SECOND, 3, "expert")
    assert taken(shares) == [(0, 0), (0, 1), (1, 2)] and objective == pytest.approx(1.8)


@pytest.mark.parametrize("mode", ["pairs", "token", "expert"])
@pytest.mark.parametrize("budget", [1, 7, 12.5, 24, 60])
def test_the_closed_form_is_the_solvers_optimum(mode: str, budget: float) -> None:
    pytest.importorskip("scipy")
    for seed in range(3):
        scores = torch.rand(12, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        shares, objective = routing_program(scores, budget, mode)
        solved, best = routing_program_by_solver(scores, budget, mode)
        assert objective == pytest.approx(best, abs=1e-9)
        torch.testing.assert_close(shares, solved, atol=1e-7, rtol=0)
        assert float(shares.sum()) == pytest.approx(budget)


@pytest.mark.spec("usmoe", "6.5")
@given(rows=st.integers(1, 9), experts=st.integers(1, 6), share=st.floats(0.02, 1.0), seed=st.integers(0, 10_000))
def test_the_pair_budget_is_never_worse(rows: int, experts: int, share: float, seed: int) -> None:
    scores = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    budget = share * rows * experts
    _, pairs = routing_program(scores, budget)
    for mode in ("token", "expert"):
        shares, other = routing_program(scores, budget, mode)
        assert pairs >= other - 1e-9
        each = shares.sum(1 if mode == "token" else 0)
        torch.testing.assert_close(each, torch.full_like(each, budget / len(each)), atol=1e-8, rtol=0)


def test_doors() -> None:
    with pytest.raises(ValueError, match="mode must be one of"):
        routing_program(FIRST, 2, "both")
    for budget in (0, 7, math.nan):
        with pytest.raises(ValueError, match="budget must lie in"):
            routing_program(FIRST, budget)
    with pytest.raises(ValueError, match="scores_LE must have shape"):
        routing_program(torch.zeros(0, 3), 1)
    with pytest.raises(ValueError, match="not finite"):
        routing_program(torch.tensor([[math.inf, 0.0]]), 1)
