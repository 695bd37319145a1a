"""Adam for large embedding tables whose gradients are sparse: only rows that were read move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class RowAdam(torch.optim.Optimizer):
    r"""Lazy Adam with one second moment per row.

    For each row :math:`r` with a gradient :math:`g_r` in this step (others keep weights and moments untouched)

    .. math:: m_r \leftarrow \beta_1 m_r + (1 - \beta_1) g_r, \quad
       v_r \leftarrow \beta_2 v_r + (1 - \beta_2) \overline{g_r^2}, \quad
       w_r \leftarrow w_r - \eta \, m_r / (\sqrt{v_r} + \epsilon)

    without bias correction: a row's first step has the size :math:`\eta (1 - \beta_1) / \sqrt{1 - \beta_2}`. A step
    costs the rows it touched, and the state one table and one column (compare Adafactor, arXiv:1804.04235).

    Args:
        params: tables (R, D), or groups of them.
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`.

    Raises:
        ValueError: a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.85, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"RowAdam moves tables (R, D), got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; dense gradients are read as touching every row."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter[:, :1])
                grad = parameter.grad
                if grad.is_sparse:
                    grad = grad.coalesce()
                    rows, values = grad.indices()[0], grad.values()
                else:
                    rows, values = torch.arange(grad.shape[0], device=grad.device), grad
                mean = state["mean"][rows].lerp_(values, 1 - first)
                square = state["square"][rows].lerp_(values.square().mean(1, keepdim=True), 1 - second)
                state["mean"][rows] = mean
                state["square"][rows] = square
                parameter.index_add_(0, rows, mean / (square.sqrt() + group["eps"]), alpha=-group["lr"])
        return loss
