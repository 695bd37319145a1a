"""Entropy of the routing: sharp decisions, or decisions that use all experts."""

from __future__ import annotations

import math

from torch import Tensor

from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Routing
from moesaic.routing.routing import row_entropy

OF = ("row", "mean")


def entropy_loss(routing: Routing) -> Tensor:
    r"""Mean entropy of a row's probabilities in nats; lower is sharper.

    .. math:: L = -\frac{1}{T} \sum_t \sum_e p_{t,e} \log p_{t,e}

    Between 0 and log E. The term that keeps top-p routing from using every expert (arXiv:2403.07652).

    Args:
        routing: needs logits.

    Returns:
        A scalar; 0 without real rows.

    Raises:
        ValueError: no logits.
    """
    return routing.entropy


def mean_entropy_loss(routing: Routing) -> Tensor:
    r"""What the entropy of the mean probabilities lacks to its maximum, in nats; lower is more balanced.

    .. math:: L = \log E + \sum_e P_e \log P_e, \qquad P_e = \frac{1}{T} \sum_t p_{t,e}

    Between 0 (uniform) and log E (one expert). Unlike the balance loss it counts probabilities and no choices.

    Args:
        routing: needs logits.

    Returns:
        A scalar; 0 without real rows.

    Raises:
        ValueError: no logits.
    """
    rows = routing.real_T.sum()
    mean_1E = routing.probs_TE.sum(0, keepdim=True) / rows.clamp(min=1)
    return (math.log(routing.num_experts) - row_entropy(mean_1E).sum()) * (rows > 0)


class EntropyLoss(RoutingLoss):
    """:func:`entropy_loss` or :func:`mean_entropy_loss` of each forward, as a part of a layer.

    Args:
        coefficient: see :class:`RoutingLoss`.
        of: ``"row"`` sharpens each row's probabilities, ``"mean"`` spreads their mean over the experts.

    Raises:
        ValueError: another ``of``.
    """

    def __init__(self, coefficient: float = 1e-3, *, of: str = "row") -> None:
        super().__init__(coefficient)
        if of not in OF:
            raise ValueError(f"of must be one of {OF}, got {of!r}")
        self.of = of
        self.name = "entropy" if of == "row" else "entropy_mean"

    def value(self, routing: Routing, context: Context) -> Tensor:
        """The loss of this forward."""
        return entropy_loss(routing) if self.of == "row" else mean_entropy_loss(routing)
