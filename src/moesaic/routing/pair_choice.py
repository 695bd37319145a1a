"""Pair choice: one budget over all row-expert pairs of a group (USMoE)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.routing.context import Context
from moesaic.routing.expert_choice import decision_groups, group_sizes, rank_in_group
from moesaic.routing.pair_choice_scores import EXPERT_SIDES, check_rate, unified_score
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing, gather_slots, ids_of_mask
from moesaic.routing.state import StepCounter

GROUPINGS = ("sequence", "batch", "position", "token", "causal")
NORMALIZATIONS = ("none", "all", "selected")
# Scores are summed as integers of this many binary digits, so that order and number of micro-batches do not matter.
_FIXED_POINT = 2.0**32


class PairChoiceRouter(Router):
    r"""Unified routing (USMoE), arXiv:2503.22996: the best row-expert pairs of a group, wherever they lie.

    Top-k gives every row k experts and expert choice gives every expert c rows; here only the total is fixed. With the
    score :math:`S` of :func:`unified_score`, a group of n real rows takes its

    .. math:: B = \max(1, \lfloor k\, n \rfloor) \quad \text{largest of the } S_{t,e}, \qquad w_{t,e} = S_{t,e},

    which is the optimum of the linear program that :func:`routing_program` writes down. A row may use 0 to E experts
    (``routing.extras["unrouted_rows"]`` counts real rows without any), an expert 0 to n rows; k may be fractional. Ties
    go to the earlier row, then to the lower expert. Padding is never chosen and makes no budget.

    Which rows share a budget is explicit, because it decides what a row may know:

    * ``"sequence"``: rows of one ``context.group_T`` (the authors' training-free models). A row's experts depend on
      later rows.
    * ``"batch"``: all rows. They depend on later rows and on the other sequences.
    * ``"position"``: rows at one ``context.position_T`` (the authors' language models). Nothing leaks from the future;
      a row's experts depend on the other sequences of the batch, and a sequence alone gets k experts a token.
    * ``"token"``: each row by itself; top-k on S.
    * ``"causal"`` (ours): every pair whose score reaches a running threshold, the moving average over optimizer steps
      of the groups' B-th score. A row's experts depend on that row alone, in training as in generation; the budget
      holds on average. In evaluation the threshold is what it was last; before the first step it is that of standard
      normal logits.

    A causal model therefore refuses the first two.

    Args:
        dim: model width D.
        num_experts: E.
        experts_per_token: k, the budget per real row, in (0, E].
        rate: share of the expert side in the score, in [0, 1]; the authors' code has 0.5 everywhere.
        expert_side: ``"sigmoid"`` (the authors') or ``"token_softmax"`` (softmax over the group's rows, the score of
            classical expert choice).
        grouping: one of the five above.
        normalize: ``"none"`` leaves w as it is (the authors', where the backbone does not renormalise), ``"all"``
            divides by the row's sum of S over all experts, ``"selected"`` by that over the chosen ones.
        decay: of the moving average of ``"causal"``, in [0, 1).
        allow_future: let a causal model use a grouping that looks ahead (its generation, token by token, is then
            another function than its training).

    Shapes:
        x_TD -> Routing with K = most experts used by one row.

    Raises:
        ValueError: values out of range, unknown names; ``expert_side="token_softmax"`` with ``grouping="causal"``,
            which would compare a row with later ones; a context without the field that the grouping needs.
    """

    threshold: Tensor
    threshold_steps: Tensor

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {"weight_ED": ParameterSpec(("expert", "model"), "router")}

    def __init__(
        self,
        dim: int,
        num_experts: int,
        experts_per_token: float = 2.0,
        *,
        rate: float = 0.5,
        expert_side: str = "sigmoid",
        grouping: str = "sequence",
        normalize: str = "none",
        decay: float = 0.9,
        allow_future: bool = False,
    ) -> None:
        super().__init__(dim, num_experts)
        if not 0 < experts_per_token <= num_experts:
            raise ValueError(f"experts_per_token must lie in (0, num_experts = {num_experts}], got {experts_per_token}")
        check_rate(rate)
        for name, value, allowed in (
            ("expert_side", expert_side, EXPERT_SIDES),
            ("grouping", grouping, GROUPINGS),
            ("normalize", normalize, NORMALIZATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        if expert_side == "token_softmax" and grouping == "causal":
            raise ValueError(
                "expert_side='token_softmax' compares a row with later ones, which grouping='causal' must not: use"
                " expert_side='sigmoid' or another grouping"
            )
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self.experts_per_token = experts_per_token
        self.rate = rate
        self.expert_side = expert_side
        self.grouping = grouping
        self.normalize = normalize
        self.decay = decay
        self.allow_future = allow_future
        if grouping in ("sequence", "position"):
            self.needs = ("group_T",) if grouping == "sequence" else ("position_T",)
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32))
        if grouping == "causal":
            self.register_buffer("threshold", torch.empty((), dtype=torch.float32))
            self.register_buffer("threshold_steps", torch.empty((), dtype=torch.int64))
        self._seen = StepCounter(2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(D); the threshold of standard normal logits."""
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)
        if self.grouping == "causal":
            self.threshold.fill_(default_threshold(self.experts_per_token, self.num_experts, self.rate))
            self.threshold_steps.zero_()

    def check_causal(self) -> None:
        """Refuse a causal model where a row's experts may depend on later rows.

        Raises:
            ValueError: ``grouping`` is ``"sequence"`` or ``"batch"`` and ``allow_future`` is off.
        """
        if self.grouping in ("sequence", "batch") and not self.allow_future:
            raise ValueError(
                f"PairChoiceRouter with grouping={self.grouping!r} lets a token compete with later tokens, so a causal"
                " model would see its future in training and be another function in generation: use"
                " grouping='causal', 'position' or 'token', or allow_future=True if nothing is generated"
            )

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) = x W^T."""
        return F.linear(x_TD, self.weight_ED.to(x_TD.dtype))

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """The best allowed pairs of each group, row by row, experts in ascending order."""
        logits_TE = logits_TE.detach() if allowed_TE is None else self.restrict(logits_TE.detach(), allowed_TE)
        scores_TE = self.scores(logits_TE, context)
        eligible_TE = torch.ones_like(scores_TE, dtype=torch.bool) if allowed_TE is None else allowed_TE
        if context.token_mask_T is not None:
            eligible_TE = eligible_TE & context.token_mask_T[:, None]
        if self.grouping == "causal":
            return ids_of_mask((scores_TE >= self.threshold.to(scores_TE.dtype)) & eligible_TE)
        budget_T, rank_TE = self._ranked(scores_TE.masked_fill(~eligible_TE, -torch.inf), context)
        return ids_of_mask((rank_TE < budget_T[:, None]) & eligible_TE)

    def scores(self, logits_TE: Tensor, context: Context) -> Tensor:
        """(T, E) unified scores S, before any normalisation."""
        group_T = None
        if self.expert_side == "token_softmax":
            context.require(self.needs, type(self).__name__)
            group_T, _ = decision_groups(context, self.grouping, logits_TE)
        return unified_score(
            logits_TE, self.rate, self.expert_side, group_T=group_T, token_mask_T=context.token_mask_T, check=False
        )

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """Scores of the chosen pairs, normalised as ``normalize`` says."""
        scores_TE = self.scores(logits_TE, context)
        picked_TK = gather_slots(scores_TE, ids_TK)
        if self.normalize == "none":
            return picked_TK
        whole = scores_TE if self.normalize == "all" else picked_TK
        total_T1 = whole.sum(-1, keepdim=True)
        return picked_TK / torch.where(total_T1 > 0, total_T1, 1.0)  # only a row without experts sums to 0

    def decide(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Routing:
        """See :meth:`Router.decide`; also counts real rows without experts and, in training, the budget's score."""
        routing = super().decide(logits_TE, ids_TK, context)
        extras = {**routing.extras, "unrouted_rows": (routing.real_T & (routing.active_T == 0)).sum()}
        if self.grouping == "causal" and self.counting():
            extras["budget_scores"] = self._budget_scores(logits_TE.detach(), context)
        return routing.replace(extras=extras)

    def observe(self, routing: Routing) -> None:
        """Gather the B-th scores of the groups, for the threshold."""
        if self.grouping == "causal":
            self._seen.add(routing.extras["budget_scores"])

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the threshold by the mean B-th score of the step, over all micro-batches and ranks."""
        if self.grouping != "causal":
            return
        total, groups = self._seen.drain(self.threshold.device).tolist()
        if groups:
            mean = total / _FIXED_POINT / groups
            kept = self.decay if int(self.threshold_steps) else 0.0
            self.threshold.mul_(kept).add_((1 - kept) * mean)
            self.threshold_steps += 1

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        size = f"{self.dim} -> {self.num_experts}, {self.experts_per_token:g} per token"
        return f"{size}, rate={self.rate:g}, grouping={self.grouping!r}, normalize={self.normalize!r}"

    def _ranked(self, scores_TE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """(T,) budget of each row's group, (T, E) rank of each pair inside its group, 0 the best."""
        group_T, num_groups = decision_groups(context, self.grouping, scores_TE)
        budget_G = budgets(group_sizes(group_T, num_groups, context.token_mask_T), self.experts_per_token)
        pairs_N1 = scores_TE.reshape(-1, 1)
        rank_N1 = rank_in_group(pairs_N1, group_T.repeat_interleave(scores_TE.shape[1]), num_groups)
        return budget_G[group_T], rank_N1.view(scores_TE.shape)

    def _budget_scores(self, logits_TE: Tensor, context: Context) -> Tensor:
        """(2,) int64: sum over groups of the B-th best score in fixed point, and how many groups."""
        scores_TE = self.scores(logits_TE, context)
        if context.token_mask_T is not None:
            scores_TE = scores_TE.masked_fill(~context.token_mask_T[:, None], -torch.inf)
        budget_T, rank_TE = self._ranked(scores_TE, context)
        last_N = scores_TE[(rank_TE == budget_T[:, None] - 1) & torch.isfinite(scores_TE)]
        total = (last_N.double() * _FIXED_POINT).round().to(torch.int64).sum()
        return torch.stack([total, torch.full_like(total, last_N.numel())])


def budgets(rows_G: Tensor, experts_per_token: float) -> Tensor:
    """(G,) int64 pairs that groups of so many real rows take: floor(k n), at least 1 where there is a row."""
    # 1e-9: k n that is whole on paper must not be rounded down for its last binary digit.
    pairs_G = (rows_G.double() * experts_per_token + 1e-9).floor().to(torch.int64)
    return pairs_G.clamp(min=1).masked_fill(rows_G == 0, 0)


@lru_cache(maxsize=64)
def default_threshold(experts_per_token: float, num_experts: int, rate: float) -> float:
    """The score that k pairs a row reach where logits are standard normal, from a fixed draw of a few thousand rows."""
    rows = 4096
    generator = torch.Generator(device="cpu").manual_seed(0)
    # On the CPU also while a model is built on the meta device.
    logits_TE = torch.randn((rows, num_experts), generator=generator, dtype=torch.float64, device="cpu")
    scores = unified_score(logits_TE, rate).reshape(-1)
    count = max(1, math.floor(experts_per_token * rows))
    return float(scores.sort(descending=True).values[count - 1])
