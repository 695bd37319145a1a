"""A loss part: a function of a routing, with a coefficient and a scope, that a layer adds to its routing."""

from __future__ import annotations

import math

from torch import Tensor

from moesaic.routing import Context, Routing, StepState


class RoutingLoss(StepState):
    """Base of losses given to :class:`~moesaic.layers.moe.MoE`.

    The layer adds ``coefficient * value`` to ``routing.losses[name]``, one term a layer. Padded rows count nowhere, and
    a routing without real rows gives 0.

    Args:
        coefficient: factor of the value; the gradient is exactly linear in it.

    Attributes:
        name: key in ``routing.losses``.
        scope: which decisions the value speaks of: ``"batch"`` (those of this forward), ``"sequence"`` (those of one
            sequence, then the mean) or ``"global"`` (those of the optimizer step so far, over all ranks).

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

    def extra_repr(self) -> str:
        """What tells two losses apart in a printed model."""
        return f"coefficient={self.coefficient:g}, scope={self.scope!r}"
