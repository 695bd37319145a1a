"""The one way into a layer's decision: interventions that an MoE reports to while they are open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moesaic.routing import Context, Routing
from moesaic.routing.state import in_recompute

Chooser = Callable[[Tensor | None, Tensor | None, bool], Routing]
"""What ``call.choose`` does in a layer: (ids_TK, allowed_TE, keep_scores) -> Routing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One run of one MoE layer, as an intervention sees it.

    Attributes:
        layer: the handle of the layer (:class:`moesaic.models.MoELayer`), with its name and index.
        x_TD: (T, D) input of the layer.
        context: what is known beside it.
        routing: the routing about to be used.
        router: the module that made it, or None where the bank routes itself.
    """

    layer: Any
    x_TD: Tensor
    context: Context
    routing: Routing
    router: nn.Module | None
    _chooser: Chooser

    def choose(
        self, ids_TK: Tensor | None = None, allowed_TE: Tensor | None = None, *, keep_scores: bool = False
    ) -> Routing:
        """The routing that this model gives to another choice, weighed by its own rule.

        The model's rule about renormalising always holds: where it divides the chosen scores by their sum, so here,
        and where it does not, an emptied slot leaves the other weights as they were.

        Args:
            ids_TK: (T, K') int64 expert ids, E in empty slots; any K'.
            allowed_TE: (T, E) or (E,) bool; what the model would do if the other experts did not exist: their logits
                are -inf before the scores are formed. Equal to dropping them
                (:func:`~moesaic.models.surgery.drop_experts`).
            keep_scores: with ``allowed_TE``, only choose among these: scores stay as all experts together give them,
                so that in a model which does not renormalise an allowed expert keeps the weight that it had.

        Raises:
            ValueError: neither or both given, ``keep_scores`` with ``ids_TK``, shapes that do not fit, a model whose
                rule cannot weigh another choice.
        """
        if (ids_TK is None) == (allowed_TE is None):
            raise ValueError("choose needs exactly one of ids_TK and allowed_TE")
        if keep_scores and allowed_TE is None:
            raise ValueError("keep_scores=True needs allowed_TE: scores of ids_TK are always those of all experts")
        rows, experts = self.routing.num_rows, self.routing.num_experts
        if ids_TK is not None and (ids_TK.dim() != 2 or ids_TK.shape[0] != rows or ids_TK.dtype != torch.int64):
            raise ValueError(f"ids_TK must be int64 of shape ({rows}, K), got {ids_TK.dtype} {tuple(ids_TK.shape)}")
        if allowed_TE is not None:
            if allowed_TE.dtype != torch.bool or allowed_TE.shape not in ((rows, experts), (experts,)):
                raise ValueError(
                    f"allowed_TE must be bool of shape ({rows}, {experts}) or ({experts},),"
                    f" got {allowed_TE.dtype} {tuple(allowed_TE.shape)}"
                )
            allowed_TE = allowed_TE.expand(rows, experts)
        return self._chooser(ids_TK, allowed_TE, keep_scores)


class Intervention(Protocol):
    """What an open ``override_routing`` or ``record_routing`` offers to a layer of ours."""

    def handle_of(self, module: nn.Module) -> Any | None:
        """The handle of ``module`` when this intervention concerns it, else None."""

    def route(self, call: Call) -> Routing:
        """The routing to use instead of ``call.routing`` (which may be returned)."""

    def output(self, call: Call, y_TO: Tensor) -> Tensor:
        """The output to use instead of ``y_TO`` (which may be returned)."""


_open: ContextVar[tuple[Intervention, ...]] = ContextVar("moesaic_interventions", default=())
_everywhere: list[Intervention] = []


@contextmanager
def opened(intervention: Intervention) -> Iterator[None]:
    """Keep ``intervention`` open inside the block; those opened later (inner) act first."""
    token = _open.set((*_open.get(), intervention))
    _everywhere.append(intervention)
    try:
        yield
    finally:
        _everywhere.remove(intervention)
        _open.reset(token)


def concerning(module: nn.Module) -> list[tuple[Intervention, Any]]:
    """Open interventions that concern ``module``, inner first, each with its handle.

    Backward on an accelerator runs in threads of its own, which see no context variables: what is recomputed there is
    given every open intervention of the process, else it would be computed without the overrides of the first pass.
    """
    items = _open.get()
    if not items and _everywhere and in_recompute():
        items = tuple(_everywhere)
    return [(item, handle) for item in reversed(items) if (handle := item.handle_of(module)) is not None]


def decide(
    found: list[tuple[Intervention, Any]],
    x_TD: Tensor,
    context: Context,
    routing: Routing,
    router: nn.Module | None,
    chooser: Chooser,
    settle: Callable[[Routing], Routing] = lambda routing: routing,
) -> tuple[Routing, list[tuple[Intervention, Call]]]:
    """Ask every intervention in turn; each sees the routing that the one before it decided on.

    Args:
        found: from :func:`concerning`.
        x_TD: (T, D) input of the layer.
        context: what is known beside it.
        routing: the routing about to be used.
        router: the module that made it.
        chooser: what ``call.choose`` does.
        settle: what the layer does to a changed routing before anybody else sees it (emptying padded rows).

    Returns:
        The routing to use (the same object when nobody changed it), and each intervention's call, for its output.

    Raises:
        TypeError: an override that returned no Routing.
        ValueError: one that returned other rows or experts.
    """
    calls: list[tuple[Intervention, Call]] = []
    for intervention, handle in found:
        call = Call(handle, x_TD, context, routing, router, chooser)
        changed = intervention.route(call)
        if changed is not routing:
            if not isinstance(changed, Routing):
                raise TypeError(f"an override must return a Routing, got {type(changed).__name__}")
            if changed.num_rows != routing.num_rows or changed.num_experts != routing.num_experts:
                raise ValueError(
                    f"an override returned {changed.num_rows} rows over {changed.num_experts} experts,"
                    f" the layer has {routing.num_rows} rows over {routing.num_experts}"
                )
            routing = settle(changed)
        calls.append((intervention, call))
    return routing, calls
