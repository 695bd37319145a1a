"""An MoE where a foreign model wants a module from tensor to tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from moesaic.layers.moe import MoE
from moesaic.routing import Context, Routing
from moesaic.routing.state import in_recompute


class BareMoE(nn.Module):
    """An :class:`MoE` that returns its output only, to be put in the place of a foreign model's feed-forward block.

    Open interventions see it like any other MoE. Its routings, losses included, go to the open
    :func:`collect_routings`; with none open they are dropped.

    Args:
        moe: the layer.

    Shapes:
        x (..., D) -> (..., O).
    """

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """The layer's output; ``context`` defaults to that of the open :func:`collect_routings`."""
        collected = _open.get()
        if context is None and collected is not None:
            context = collected.context
        y, routing = self.moe(x, context)
        if collected is not None and not in_recompute():
            collected.routings.append(routing)
        return y  # type: ignore[no-any-return]


@dataclasses.dataclass
class Collected:
    """What the bare MoEs of a model did while it was open, in the order in which they ran."""

    context: Context | None = None
    routings: list[Routing] = dataclasses.field(default_factory=list)

    def losses(self) -> dict[str, Tensor]:
        """Sum over layers of each loss, by name."""
        total: dict[str, Tensor] = {}
        for routing in self.routings:
            for name, value in routing.losses.items():
                total[name] = total[name] + value if name in total else value
        return total

    def total_loss(self) -> Tensor:
        """Sum of all losses, to be added to the main one; zero when there are none."""
        values = list(self.losses().values())
        return torch.stack(values).sum() if values else torch.zeros(())


_open: ContextVar[Collected | None] = ContextVar("moesaic_collected", default=None)


@contextmanager
def collect_routings(context: Context | None = None) -> Iterator[Collected]:
    """Collect the routings of every :class:`BareMoE` that runs inside the block (first passes only), with gradient.

    Args:
        context: what these layers are to know beside the tokens (padding, groups); a foreign model passes none on.
    """
    collected = Collected(context)
    token = _open.set(collected)
    try:
        yield collected
    finally:
        _open.reset(token)
