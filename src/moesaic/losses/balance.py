"""Load balance: the loss of Switch Transformers over a batch, a sequence or the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Routing
from moesaic.routing.state import reduce_sum

SCOPES = ("batch", "sequence", "global")


def balance_loss(routing: Routing, *, load_E: Tensor | None = None, group_T: Tensor | None = None) -> Tensor:
    r"""Load-balance loss of Switch Transformers, arXiv:2101.03961, for any number of experts per row.

    .. math:: L = E \sum_e f_e P_e, \qquad f_e = \frac{n_e}{\sum_j n_j}, \qquad P_e = \frac{1}{T} \sum_t p_{t,e}

    with the load :math:`n_e` (no gradient) and the probabilities p of the T real rows. It is 1 at uniform loads or
    uniform probabilities, and E where one expert takes every row with probability 1 (E / K where K experts take every
    row in equal parts).

    Args:
        routing: needs logits.
        load_E: (E,) loads for f instead of those of ``routing``, say of a whole step.
        group_T: (T,) int64; the loss inside each group, then the mean over groups that have real rows (the
            sequence-wise loss of DeepSeek-V2, arXiv:2405.04434).

    Returns:
        A scalar; 0 without real rows.

    Raises:
        ValueError: no logits; ``group_T`` or ``load_E`` of another length, or both given.
    """
    probs_TE, experts = routing.probs_TE, routing.num_experts
    if group_T is None:
        if load_E is not None and load_E.shape != (experts,):
            raise ValueError(f"load_E must have shape ({experts},), got {tuple(load_E.shape)}")
        mean_E = probs_TE.sum(0) / routing.real_T.sum().clamp(min=1)
        return experts * (_share(routing.load_E if load_E is None else load_E, probs_TE.dtype) * mean_E).sum()
    if load_E is not None:
        raise ValueError("balance_loss takes load_E or group_T, not both")
    if group_T.shape != (routing.num_rows,):
        raise ValueError(
            f"group_T must have one entry for each of {routing.num_rows} decisions, got {tuple(group_T.shape)}"
        )
    names, index_T = torch.unique(group_T, return_inverse=True)
    loads_GE = _sum_groups(_counts(routing), index_T, names.numel())
    rows_G = _sum_groups(routing.real_T.to(torch.int64), index_T, names.numel())
    mean_GE = _sum_groups(probs_TE, index_T, names.numel()) / rows_G.clamp(min=1)[:, None]
    per_group_G = experts * (_share(loads_GE, probs_TE.dtype) * mean_GE).sum(1)
    return per_group_G.sum() / (rows_G > 0).sum().clamp(min=1)


class BalanceLoss(RoutingLoss):
    """:func:`balance_loss` as a part of a layer, over one of three scopes.

    * ``"batch"``: f and P over this forward.
    * ``"sequence"``: both inside each ``context.group_T``, then the mean over sequences.
    * ``"global"`` (arXiv:2501.11873): P over this forward; f over every decision of the optimizer step so far, those of
      this forward and of all ranks included, kept as integers. A micro-batch repeated, or split over ranks, gives the
      gradient of the one batch. While training, each forward is a collective of E integers that all ranks must
      take part in, also one without rows; :func:`~moesaic.routing.end_step` starts the next step. In evaluation f is
      that of the forward alone and nothing is exchanged.

    Args:
        coefficient: see :class:`RoutingLoss`; 0.01 in Switch.
        scope: one of the above.

    Raises:
        ValueError: an unknown scope; ``"sequence"`` for a context without groups.
    """

    def __init__(self, coefficient: float = 0.01, *, scope: str = "batch") -> None:
        super().__init__(coefficient)
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
        self.scope = scope
        self.name = "balance" if scope == "batch" else f"balance_{scope}"
        self._step_load_E: Tensor | None = None

    def value(self, routing: Routing, context: Context) -> Tensor:
        """The loss over the scope; see the class."""
        if self.scope == "sequence":
            context.require(("group_T",), "BalanceLoss(scope='sequence')")
            return balance_loss(routing, group_T=context.group_T)
        if self.scope == "global" and self.training:
            return balance_loss(routing, load_E=self._load_of_step(routing))
        return balance_loss(routing)

    def end_step(self) -> None:
        """Forget the loads of the step."""
        self._step_load_E = None

    def _load_of_step(self, routing: Routing) -> Tensor:
        if self.counting():
            load_E = reduce_sum(routing.load_E)
            self._step_load_E = load_E if self._step_load_E is None else self._step_load_E + load_E
        # A recomputed block reads what the first pass summed; where there was none, its own loads.
        return routing.load_E if self._step_load_E is None else self._step_load_E


def _share(load: Tensor, dtype: torch.dtype) -> Tensor:
    return load.to(dtype) / load.sum(-1, keepdim=True).clamp(min=1)


def _counts(routing: Routing) -> Tensor:
    """(T, E) int64 filled slots, so that sums over rows are loads."""
    counts = torch.zeros(
        (routing.num_rows, routing.num_experts + 1), dtype=torch.int64, device=routing.expert_ids_TK.device
    )
    ids = routing.expert_ids_TK
    return counts.scatter_add(1, ids, torch.ones_like(ids))[:, : routing.num_experts]


def _sum_groups(values: Tensor, index_T: Tensor, groups: int) -> Tensor:
    return values.new_zeros((groups, *values.shape[1:])).index_add(0, index_T, values)
