"""The MoE layer: a router, a bank of experts, shared experts and losses, composed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moesaic.experts import Experts
from moesaic.layers.intervention import Call, Chooser, Intervention, concerning, decide
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
        losses: parts that add a term to ``routing.losses``, each under its own name.

    Shapes:
        x (..., D), Context over the flattened rows -> y (..., O), Routing. The routing is returned, not kept on the
        module; it has one row a decision (a group, where the router decides per group), and is what was used: where an
        override changed it, the override's, whose own ``losses`` then stand in place of the router's.

    Raises:
        ValueError: router and bank of different widths or numbers of experts; no router for a bank that needs one; an
            input of another width; a loss under a name that the router uses.
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
        if x.dim() == 0 or x.shape[-1] != self.experts.dim:
            raise ValueError(f"MoE: x must have shape (..., {self.experts.dim}), got {tuple(x.shape)}")
        context = Context() if context is None else context
        x_TD = x.reshape(-1, x.shape[-1])
        decision = self.route(x_TD, context)
        routing = self._per_token(decision, context)
        calls: list[tuple[Intervention, Call]] = []
        if found := concerning(self):
            chooser = self._chooser(decision, context)
            changed, calls = decide(
                found, x_TD, context, routing, self.router, chooser, lambda new: without_padding(new, context)
            )
            if changed is not routing:
                decision = routing = changed
        y_TO: Tensor = self.experts(x_TD, routing, context)
        if self.shared is not None:
            y_TO = y_TO + self.shared(x_TD)
        for intervention, call in calls:
            y_TO = intervention.output(call, y_TO)
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1]), self._with_losses(decision, context)

    def route(self, x_TD: Tensor, context: Context) -> Routing:
        """The routing before anybody intervenes: one row a decision."""
        if self.router is None:
            return without_padding(self.experts.route(x_TD, context), context)
        routing: Routing = self.router(x_TD, context)
        return routing if self.router.per_group else without_padding(routing, context)

    @property
    def _per_group(self) -> bool:
        return self.router is not None and self.router.per_group

    def _per_token(self, decision: Routing, context: Context) -> Routing:
        if not self._per_group:
            return decision
        context.require(("group_T",), type(self.router).__name__)
        assert context.group_T is not None
        return without_padding(decision.take(context.group_T), context)

    def _with_losses(self, routing: Routing, context: Context) -> Routing:
        if not len(self.losses):
            return routing
        if self._per_group and routing.num_rows != context.num_rows:
            # Rows are groups here: the fields of the context that speak of tokens do not fit them.
            context = Context(routing.token_mask_T, phase=context.phase, condition=context.condition)
        added: dict[str, Tensor] = {}
        with torch.autocast(routing.weights_TK.device.type, enabled=False):
            for loss in self.losses:
                assert isinstance(loss, RoutingLoss)
                if loss.name in routing.losses:
                    raise ValueError(
                        f"the router already adds a loss called {loss.name!r}: rename the one given to MoE"
                    )
                added[loss.name] = loss(routing, context)
        return routing.replace(losses={**routing.losses, **added})

    def _chooser(self, decision: Routing, context: Context) -> Chooser:
        def choose(ids_TK: Tensor | None, allowed_TE: Tensor | None, keep_scores: bool) -> Routing:
            router = self.router if self.router is not None else getattr(self.experts, "router", None)
            if router is not None and router.per_group:
                raise ValueError(f"{type(router).__name__} decides per group: override it with a Routing of your own")
            if router is None or decision.logits_TE is None or type(router).weigh is Router.weigh:
                raise ValueError(
                    f"{type(router or self.experts).__name__} cannot weigh another choice (it forms no logits or has no"
                    " rule for it): return a Routing of your own instead"
                )
            logits_TE = decision.logits_TE
            with torch.autocast(logits_TE.device.type, enabled=False):
                if allowed_TE is not None:
                    restricted_TE = router.restrict(logits_TE, allowed_TE)
                    ids_TK = router.choose(logits_TE if keep_scores else restricted_TE, context, allowed_TE)
                    logits_TE = logits_TE if keep_scores else restricted_TE
                assert ids_TK is not None
                return router.decide(logits_TE, ids_TK, context)

        return choose


def without_padding(routing: Routing, context: Context) -> Routing:
    """The routing with only empty slots in padded rows, whether or not whoever made it thought of them."""
    mask_T = context.token_mask_T
    if mask_T is None or routing.token_mask_T is mask_T:
        return routing
    if routing.num_rows != mask_T.shape[0]:
        raise ValueError(f"the routing has {routing.num_rows} rows and token_mask_T of the context {mask_T.shape[0]}")
    padded_T1 = ~mask_T[:, None]
    return routing.replace(
        expert_ids_TK=routing.expert_ids_TK.masked_fill(padded_T1, routing.num_experts),
        weights_TK=routing.weights_TK.masked_fill(padded_T1, 0.0),
        token_mask_T=mask_T,
    )
