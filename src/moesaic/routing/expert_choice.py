"""Expert choice: experts pick their rows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing, gather_slots, ids_of_mask

GROUPINGS = ("sequence", "batch", "position")


class ExpertChoiceRouter(Router):
    r"""Expert-choice routing, arXiv:2202.09368: balanced by construction, a variable number of experts per row.

    Inside each group of rows every expert takes the :math:`C` rows with its highest scores
    :math:`s_{t,e} = \mathrm{softmax}_e(W x_t)`,

    .. math:: C = \lceil c\, n / E \rceil, \qquad w_{t,e} = s_{t,e},

    with n real rows in the group and c experts per row on average. A row may be picked by several experts or by none
    (its slots are empty; ``routing.extras["unrouted_rows"]`` counts such real rows). Padding is never picked and
    makes no capacity. Ties go to the earlier row.

    ``choose`` looks at all rows of a group together and returns them row by row, experts in ascending order; ``weigh``
    looks at one row at a time, so another choice is weighed by the same scores.

    Which rows compete is explicit, because it decides what a row may know:

    * ``"sequence"``: rows of one ``context.group_T``. A token's decision depends on later tokens of its sequence.
    * ``"batch"``: all rows. It depends on later tokens and on the other sequences.
    * ``"position"``: rows at one ``context.position_T``. Nothing leaks from the future, but a decision depends on the
      other sequences of the batch, and a sequence alone, with n = 1 and so C = 1, goes to every expert.

    A causal model therefore refuses the first two.

    Args:
        dim: model width D.
        num_experts: E.
        experts_per_token: c, in (0, E].
        grouping: one of the three above.
        allow_future: let a causal model use a grouping that looks ahead (its generation, token by token, is then
            another function than its training).

    Shapes:
        x_TD -> Routing with K = most experts that picked one row.

    Raises:
        ValueError: c outside (0, E], an unknown grouping, a context without the field that the grouping needs.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {"weight_ED": ParameterSpec(("expert", "model"), "router")}

    def __init__(
        self,
        dim: int,
        num_experts: int,
        experts_per_token: float = 2.0,
        *,
        grouping: str = "sequence",
        allow_future: bool = False,
    ) -> None:
        super().__init__(dim, num_experts)
        if not 0 < experts_per_token <= num_experts:
            raise ValueError(f"experts_per_token must lie in (0, num_experts = {num_experts}], got {experts_per_token}")
        if grouping not in GROUPINGS:
            raise ValueError(f"grouping must be one of {GROUPINGS}, got {grouping!r}")
        self.experts_per_token = experts_per_token
        self.grouping = grouping
        self.allow_future = allow_future
        if grouping != "batch":
            self.needs = ("group_T",) if grouping == "sequence" else ("position_T",)
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(D)."""
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)

    def check_causal(self) -> None:
        """Refuse a causal model unless rows compete only with rows at their own position.

        Raises:
            ValueError: ``grouping`` looks ahead and ``allow_future`` is off.
        """
        if self.grouping != "position" and not self.allow_future:
            raise ValueError(
                f"ExpertChoiceRouter with grouping={self.grouping!r} picks a token by comparing it with later tokens,"
                " so a causal model would see its future in training and be another function in generation: use"
                " grouping='position', a TopKRouter, or allow_future=True if nothing is generated"
            )

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) = x W^T."""
        return F.linear(x_TD, self.weight_ED.to(x_TD.dtype))

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """What the experts pick in each group; rows that an expert may not take use none of its capacity.

        An expert that no row of a group may take is not there: it does not count in E of the capacity.
        """
        logits_TE = logits_TE.detach()
        scores_TE = (logits_TE if allowed_TE is None else self.restrict(logits_TE, allowed_TE)).softmax(-1)
        eligible_TE = torch.ones_like(scores_TE, dtype=torch.bool) if allowed_TE is None else allowed_TE
        if context.token_mask_T is not None:
            eligible_TE = eligible_TE & context.token_mask_T[:, None]
        group_T, num_groups = decision_groups(context, self.grouping, logits_TE)
        rank_TE = rank_in_group(scores_TE.masked_fill(~eligible_TE, -torch.inf), group_T, num_groups)
        present_G = None
        if allowed_TE is not None:
            pairs_GE = eligible_TE.new_zeros((num_groups, self.num_experts), dtype=torch.int64)
            present_G = (pairs_GE.index_add(0, group_T, eligible_TE.to(torch.int64)) > 0).sum(1).clamp(min=1)
        capacity_T = self._capacity(context, group_T, num_groups, present_G)[group_T]
        return ids_of_mask((rank_TE < capacity_T[:, None]) & eligible_TE)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """The scores of the experts that picked the row."""
        return gather_slots(logits_TE.softmax(-1), ids_TK)

    def decide(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Routing:
        """See :meth:`Router.decide`; also counts the real rows that nobody picked."""
        routing = super().decide(logits_TE, ids_TK, context)
        unrouted = (routing.real_T & (routing.active_T == 0)).sum()
        return routing.replace(extras={**routing.extras, "unrouted_rows": unrouted})

    def _capacity(self, context: Context, group_T: Tensor, num_groups: int, experts_G: Tensor | None = None) -> Tensor:
        """(groups,) rows that each expert takes: ceil(c n / E) of the n real ones, with E from ``experts_G``."""
        rows_G = group_sizes(group_T, num_groups, context.token_mask_T)
        experts: int | Tensor = self.num_experts if experts_G is None else experts_G
        # 1e-9: c n / E that is whole on paper must not be rounded up for its last binary digit.
        return (rows_G.double() * self.experts_per_token / experts - 1e-9).ceil().to(torch.int64)

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        return f"{self.dim} -> {self.num_experts}, {self.experts_per_token:g} per token, grouping={self.grouping!r}"


def decision_groups(context: Context, grouping: str, like_TE: Tensor) -> tuple[Tensor, int]:
    """(T,) int64 number of the group of rows that each row is compared with, and how many groups there are.

    Args:
        context: holds the fields that groupings read.
        grouping: ``"sequence"`` (or ``"causal"``: all rows together without ``context.group_T``), ``"position"``,
            ``"token"`` (each row alone) or ``"batch"`` (all together).
        like_TE: says how many rows there are, and where.
    """
    rows, device = like_TE.shape[0], like_TE.device
    if grouping == "token":
        return torch.arange(rows, device=device), rows
    fields = {"sequence": context.group_T, "causal": context.group_T, "position": context.position_T}
    field = fields.get(grouping)
    if field is None:
        return torch.zeros(rows, dtype=torch.int64, device=device), 1
    names, group_T = torch.unique(field, return_inverse=True)
    return group_T, int(names.numel())


def group_sizes(group_T: Tensor, num_groups: int, token_mask_T: Tensor | None) -> Tensor:
    """(groups,) int64 number of real rows in each group."""
    real_T = torch.ones_like(group_T) if token_mask_T is None else token_mask_T.to(torch.int64)
    return torch.zeros(num_groups, dtype=torch.int64, device=group_T.device).index_add(0, group_T, real_T)


def rank_in_group(scores_TE: Tensor, group_T: Tensor, num_groups: int) -> Tensor:
    """(T, E) rank of each row inside its group, expert by expert: 0 has the highest score, ties go to the earlier row.

    Args:
        scores_TE: (T, E) scores.
        group_T: (T,) int64 group of each row, in [0, num_groups).
        num_groups: how many groups.
    """
    order_TE = torch.sort(scores_TE, dim=0, descending=True, stable=True).indices
    by_group_TE = torch.sort(group_T[order_TE], dim=0, stable=True).indices
    order_TE = order_TE.gather(0, by_group_TE)  # rows group by group, best first in each
    size_G = torch.bincount(group_T, minlength=num_groups)
    start_G = size_G.cumsum(0) - size_G
    place_T1 = torch.arange(scores_TE.shape[0], device=scores_TE.device)[:, None]
    return torch.empty_like(order_TE).scatter_(0, order_TE, place_T1 - start_G[group_T[order_TE]])
