"""Importance: experts should receive equal sums of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Routing


def importance_loss(routing: Routing) -> Tensor:
    r"""Squared coefficient of variation of the importance, arXiv:1701.06538.

    .. math:: L = \frac{\mathrm{Var}_e(I_e)}{\mathrm{Mean}_e(I_e)^2}, \qquad I_e = \sum_t w_{t,e}

    with the combine weights w and the variance over the E experts (divided by E). It is 0 at equal importance and E - 1
    where one expert receives everything; its gradient is finite at both. The scale of the weights cancels.

    Args:
        routing: any; logits are not needed.

    Returns:
        A scalar; 0 where no weight was given.
    """
    importance_E = routing.importance_E
    total = importance_E.sum()
    share_E = importance_E / torch.where(total != 0, total, 1.0)  # first, so that small weights do not underflow
    return routing.num_experts * (share_E - share_E.mean()).square().sum()


class ImportanceLoss(RoutingLoss):
    """:func:`importance_loss` of each forward, as a part of a layer.

    Args:
        coefficient: see :class:`RoutingLoss`; 0.1 in the paper.
    """

    name = "importance"

    def __init__(self, coefficient: float = 0.1) -> None:
        super().__init__(coefficient)

    def value(self, routing: Routing, context: Context) -> Tensor:
        """The loss of this forward."""
        return importance_loss(routing)
