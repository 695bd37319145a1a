"""Contract 2: what is done with the rows that a routing sends to each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.routing import Context, Routing


class Experts(nn.Module):
    """Base of all banks of experts: ``y = experts(x, routing, context)``.

    An ordinary bank writes :meth:`rows` and :meth:`weights`; dispatch and combine are done here, once. A bank may also
    replace :meth:`outputs`, :meth:`combine` or the fused :meth:`forward`.

    Args:
        dim: input width D.
        num_experts: E.
        out_dim: output width O, D by default.

    Shapes:
        x_TD, Routing with T rows -> (T, O). A row with only empty slots gets exactly zero.

    Raises:
        ValueError: non-positive sizes; an input of another width; a routing with other rows or experts.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, dim: int, num_experts: int, out_dim: int | None = None) -> None:
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        self.dim = check_count("dim", dim)
        self.num_experts = check_count("num_experts", num_experts)
        self.out_dim = check_count("out_dim", out_dim)

    def refuse_other_dtype(self, x: Tensor, weight: Tensor) -> None:
        """Refuse rows of another dtype than the weights that they meet outside autocast.

        Raises:
            ValueError: naming both.
        """
        if x.dtype != weight.dtype:
            raise ValueError(
                f"{type(self).__name__}: x is {x.dtype}, the experts are {weight.dtype}: cast one of them,"
                " or open torch.autocast"
            )

    def rows(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        """What rows sorted by expert go through.

        Args:
            x_ND: (N, D) rows, those of expert 0 first.
            counts: rows of each expert, E numbers that sum to N; 0 is allowed.
            context: the layer's context (its fields have T rows, not N).

        Returns:
            (N, O).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define rows")

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Weights of the experts ``ids`` (all by default), name -> (len(ids), ...): the one place they are read."""
        raise NotImplementedError(f"{type(self).__name__} does not define weights")

    def outputs(self, x_TD: Tensor, routing: Routing, context: Context) -> Tensor:
        """Unweighted expert outputs slot by slot, (T, K, O); exactly zero in empty slots."""
        dispatch = routing.dispatch
        y_NO = self.rows(x_TD.index_select(0, dispatch.row_N), dispatch.counts, context)
        return dispatch.slots(y_NO).view(*routing.expert_ids_TK.shape, self.out_dim)

    def combine(self, outputs_TKO: Tensor, routing: Routing) -> Tensor:
        """Weighted sum over slots, in slot order: (T, K, O) -> (T, O); in float32 where the outputs have less."""
        low = outputs_TKO.dtype in (torch.bfloat16, torch.float16)
        weights_TK = routing.weights_TK.to(torch.float32 if low else outputs_TKO.dtype)
        return (outputs_TKO * weights_TK[..., None]).sum(1).to(outputs_TKO.dtype)

    def forward(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Dispatch, compute and combine."""
        context = self.check_input(x_TD, routing, context)
        return self.combine(self.outputs(x_TD, routing, context), routing)

    def route(self, x_TD: Tensor, context: Context) -> Routing:
        """The routing of a bank whose keys are the router; only such banks have one."""
        raise NotImplementedError(f"{type(self).__name__} does not route itself: give MoE a router")

    @property
    def routes_itself(self) -> bool:
        """Whether this bank defines :meth:`route`."""
        return type(self).route is not Experts.route

    def check_input(self, x_TD: Tensor, routing: Routing, context: Context | None) -> Context:
        """Check widths, rows, experts and needs; returns the context, an empty one for None."""
        who = type(self).__name__
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(f"{who}: x_TD must have shape (T, {self.dim}), got {tuple(x_TD.shape)}")
        if routing.num_rows != x_TD.shape[0]:
            raise ValueError(f"{who}: x_TD has {x_TD.shape[0]} rows and the routing {routing.num_rows}")
        if routing.num_experts != self.num_experts:
            raise ValueError(f"{who} has {self.num_experts} experts and the routing names {routing.num_experts}")
        context = Context() if context is None else context
        context.check_rows(x_TD.shape[0], who)
        context.require(self.needs, who)
        return context


def dense_reference(experts: Experts, x_TD: Tensor, routing: Routing) -> Tensor:
    """Every expert on every row, summed with the routing matrix: the definition that fast paths are tested against.

    Costs E / K times the real work; for tests and small layers.
    """
    rows = x_TD.shape[0]
    total = x_TD.new_zeros((rows, experts.out_dim))
    for expert in range(experts.num_experts):
        counts = [0] * experts.num_experts
        counts[expert] = rows
        y_TO = experts.rows(x_TD, counts, Context())
        total = total + routing.weights_TE[:, expert, None].to(y_TO.dtype) * torch.where(
            routing.mask_TE[:, expert, None], y_TO, 0.0
        )
    return total
