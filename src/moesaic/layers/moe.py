"""The MoE layer: a router, a bank of experts, shared experts and losses, composed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moesaic.experts import Experts
from moesaic.layers.intervention import Call, Intervention, concerning, decide
from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Router, Routing


class MoE(nn.Module):
    r"""A Mixture-of-Experts layer.

    .. math:: y_t = \sum_{e \in S_t} w_{t,e} \, f_e(x_t) + s(x_t),

    with the set :math:`S_t` and the weights from the router, the functions :math:`f_e` from the bank and the shared
    expert :math:`s` if there is one.

    Args:
        experts: a bank (contract 2).
        router: a router (contract 1); None for a bank that routes itself.
        shared: a module applied to every row, (T, D) -> (T, O), added to the routed sum.
        losses: parts that add a term to ``routing.losses``.

    Shapes:
        x (..., D), Context over the flattened rows -> y (..., O), Routing. The routing is returned, not kept on the module.

    Raises:
        ValueError: router and bank of different widths or numbers of experts; no router for a bank that needs one.
    """

    def __init__(
        self,
        experts: Experts,
        router: Router | None = None,
        shared: nn.Module | None = None,
        losses: Sequence[RoutingLoss] = (),
    ) -> None:
        super().__init__()
        if router is None and not experts.routes_itself:
            raise ValueError(f"router is None and {type(experts).__name__} does not route itself: give a router")
        if router is not None and router.num_experts != experts.num_experts:
            raise ValueError(f"router chooses among {router.num_experts} experts, the bank has {experts.num_experts}")
        if router is not None and router.dim != experts.dim:
            raise ValueError(f"router works in width {router.dim}, the bank in {experts.dim}")
        names = [loss.name for loss in losses]
        if len(set(names)) != len(names):
            raise ValueError(f"losses must have different names, got {names}")
        self.experts = experts
        self.router = router
        self.shared = shared
        self.losses = nn.ModuleList(losses)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        """Route, compute, combine; see the class."""
        context = Context() if context is None else context
        x_TD = x.reshape(-1, x.shape[-1])
        decision = self.route(x_TD, context)
        routing = self._per_token(decision, context)
        found = concerning(self)
        calls: list[tuple[Intervention, Call]] = []
        if found:
            chooser = self._chooser(x_TD, decision, context)
            changed, calls = decide(found, x_TD, context, routing, self.router, chooser)
            if changed is not routing:
                decision = routing = changed
        y_TO = self.experts(x_TD, routing, context)
        if self.shared is not None:
            y_TO = y_TO + self.shared(x_TD)
        for intervention, call in calls:
            y_TO = intervention.output(call, y_TO)
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1]), self._with_losses(decision, context)

    def route(self, x_TD: Tensor, context: Context) -> Routing:
        """The routing before anybody intervenes: one row a decision."""
        if self.router is None:
            return self.experts.route(x_TD, context)
        routing: Routing = self.router(x_TD, context)
        return routing

    def _per_token(self, decision: Routing, context: Context) -> Routing:
        if self.router is None or not self.router.per_group:
            return decision
        context.require(("group_T",), type(self.router).__name__)
        assert context.group_T is not None
        return decision.take(context.group_T)

    def _with_losses(self, routing: Routing, context: Context) -> Routing:
        if not len(self.losses):
            return routing
        with torch.autocast(routing.weights_TK.device.type, enabled=False):
            added = {loss.name: loss(routing, context) for loss in self.losses}  # type: ignore[union-attr]
        return routing.replace(losses={**routing.losses, **added})

    def _chooser(self, x_TD: Tensor, decision: Routing, context: Context):  # type: ignore[no-untyped-def]
        def choose(ids_TK: Tensor | None, allowed_TE: Tensor | None) -> Routing:
            router = self.router
            if router is None or decision.logits_TE is None:
                raise ValueError(
                    f"{type(router or self.experts).__name__} forms no logits, so it cannot weigh another choice"
                )
            if router.per_group:
                raise ValueError(f"{type(router).__name__} decides per group: override it with a Routing of your own")
            if ids_TK is None:
                ids_TK = router.choose(decision.logits_TE, context, allowed_TE)
            return router.decide(decision.logits_TE, ids_TK, context)

        return choose
