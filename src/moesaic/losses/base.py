"""A loss part: a function of a routing, with a coefficient and a scope, that a layer adds to its routing."""

from __future__ import annotations

import math

from torch import Tensor

from moesaic.routing import Context, Routing, StepState


class RoutingLoss(StepState):
    """Base of losses given to :class:`~moesaic.layers.moe.MoE`; the layer adds ``coefficient * value`` to ``routing.losses[name]``.

    Args:
        coefficient: factor of the value; the gradient is exactly linear in it.

    Raises:
        ValueError: a coefficient that is negative or not finite.
    """

    name: str = ""
    scope: str = "batch"

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        if not math.isfinite(coefficient) or coefficient < 0:
            raise ValueError(f"coefficient must be finite and >= 0, got {coefficient}")
        self.coefficient = coefficient

    def value(self, routing: Routing, context: Context) -> Tensor:
        """The unscaled loss, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} does not define value")

    def forward(self, routing: Routing, context: Context) -> Tensor:
        """``coefficient * value``."""
        return self.coefficient * self.value(routing, context)
