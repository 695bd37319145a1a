"""ReLU routing: a differentiable choice whose sparsity an adaptive L1 term holds."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.formats.arguments import check_count
from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing, gather_slots, ids_of_mask
from moesaic.routing.state import StepCounter, StepState

# The coefficient moves by a constant factor a step, so it must neither reach 0 (it would stay there) nor overflow.
COEFFICIENT_RANGE = (1e-12, 1e6)


class ReLURouter(Router):
    r"""ReLU router of ReMoE, arXiv:2412.14711: fully differentiable, a variable number of experts per row.

    Row t uses the experts with a positive logit, weighted by it, and an L1 term holds the mean number at ``target``:

    .. math:: w_{t,e} = \mathrm{ReLU}(W x_t)_e, \qquad
              L = \lambda \frac{1}{T} \sum_{t,e} f_e\, w_{t,e}, \qquad
              f_e = \frac{E}{k\, T} \, \lvert\{t : w_{t,e} > 0\}\rvert,

    with T the real rows of the micro-batch, no gradient through :math:`f_e` (1 without ``balance``), and
    :math:`\lambda` from an :class:`L1Controller`, once per optimizer step. The term is ``routing.losses["relu_l1"]``.
    The paper averages over layers too; the adaptive coefficient takes such constant factors up. A row may use no
    expert. Rows that are symmetric about 0 keep half of the experts whatever the coefficient: logits fall only along a
    direction that rows share.

    Args:
        dim: model width D.
        num_experts: E.
        target: k, mean experts per row to hold, in (0, E).
        balance: weigh the term by the load of each expert, so that it also balances.
        controller: one controller for several layers, which then hold ``target`` on their average, as in the paper;
            None for one of the router's own.

    Shapes:
        x_TD -> Routing with K = most experts used by one row, in ascending order.

    Raises:
        ValueError: a target outside (0, E), or unlike that of the controller.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {"weight_ED": ParameterSpec(("expert", "model"), "router")}
    score_function = "relu"

    def __init__(
        self,
        dim: int,
        num_experts: int,
        target: float,
        *,
        balance: bool = True,
        controller: L1Controller | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        controller = L1Controller(num_experts, target) if controller is None else controller
        if (controller.num_experts, controller.target) != (num_experts, target):
            raise ValueError(
                f"controller holds {controller.target} of {controller.num_experts} experts, the router was given target"
                f" = {target} of num_experts = {num_experts}"
            )
        self.target = target
        self.balance = balance
        self.controller = controller
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(D): half of the experts are used at first."""
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)
        self.controller.reset_parameters()

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) = x W^T."""
        return F.linear(x_TD, self.weight_ED.to(x_TD.dtype))

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """The experts with a positive logit."""
        used_TE = logits_TE.detach() > 0
        if allowed_TE is not None:
            used_TE = used_TE & allowed_TE
        if context.token_mask_T is not None:
            used_TE = used_TE & context.token_mask_T[:, None]
        return ids_of_mask(used_TE)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """ReLU of the logits; an expert with a negative one gets weight 0, whoever chose it."""
        return gather_slots(logits_TE.relu(), ids_TK)

    def own_losses(self, routing: Routing) -> dict[str, Tensor]:
        """The L1 term; see the class."""
        rows = routing.real_T.sum().clamp(min=1)
        per_expert_E = routing.importance_E
        if self.balance:
            per_expert_E = per_expert_E * (self.num_experts / self.target) * routing.load_E / rows
        return {"relu_l1": self.controller.coefficient.to(per_expert_E.dtype) * per_expert_E.sum() / rows}

    def observe(self, routing: Routing) -> None:
        """Count experts used and rows for the controller."""
        self.controller.observe(routing)

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        return f"{self.dim} -> {self.num_experts}, target={self.target:g}, balance={self.balance}"


class L1Controller(StepState):
    r"""Coefficient of ReMoE's L1 term, moved once per optimizer step towards the target sparsity.

    .. math:: \lambda \leftarrow \lambda\, \alpha^{\mathrm{sign}((1 - k/E) - S)}

    with the sparsity S, the share of (row, expert) pairs not used, over all micro-batches, ranks and layers of the
    step.

    Args:
        num_experts: E.
        target: k, in (0, E).
        factor: :math:`\alpha`, above 1.
        start: :math:`\lambda_0`.

    Raises:
        ValueError: values out of range.
    """

    coefficient: Tensor

    def __init__(self, num_experts: int, target: float, *, factor: float = 1.2, start: float = 1e-8) -> None:
        super().__init__()
        num_experts = check_count("num_experts", num_experts)
        if not 0 < target < num_experts:
            raise ValueError(f"target must lie in (0, num_experts = {num_experts}), got {target}")
        if not (math.isfinite(factor) and factor > 1):
            raise ValueError(f"factor must be finite and above 1, got {factor}")
        if not COEFFICIENT_RANGE[0] <= start <= COEFFICIENT_RANGE[1]:
            raise ValueError(f"start must lie in {COEFFICIENT_RANGE}, got {start}")
        self.num_experts = num_experts
        self.target = target
        self.factor = factor
        self.start = start
        self.register_buffer("coefficient", torch.tensor(start, dtype=torch.float32))
        self._used_and_rows = StepCounter(2)

    def reset_parameters(self) -> None:
        """Set the coefficient to its start value."""
        self.coefficient.fill_(self.start)

    def observe(self, routing: Routing) -> None:
        """Count the filled slots and the real rows of ``routing``."""
        self._used_and_rows.add(torch.stack([routing.active_T.sum(), routing.real_T.sum()]))

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the coefficient; it stays where nothing was counted."""
        used, rows = self._used_and_rows.drain(self.coefficient.device).tolist()
        excess = used - self.target * rows
        if excess:
            self.coefficient *= self.factor if excess > 0 else 1 / self.factor
            self.coefficient.clamp_(*COEFFICIENT_RANGE)

    def extra_repr(self) -> str:
        """Target and pace."""
        return f"target={self.target:g} of {self.num_experts}, factor={self.factor:g}"
