"""The rule by which a foreign router chooses and weighs, found from what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.routing.routing import gather_slots

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
    "identity": lambda logits: logits,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor or number of the router (or of the block around it), read each time so that later changes count.

    Args:
        path: attribute path, as in ``"moe_statics.e_score_correction_bias"``.
        on_block: whether the path starts at the block instead of the router.
    """

    path: str
    on_block: bool = False

    def read(self, router: nn.Module, block: nn.Module) -> Tensor | float:
        """The value now."""
        value: Tensor | float = attrgetter(self.path)(block if self.on_block else router)
        return value


@dataclasses.dataclass(frozen=True)
class Groups:
    """Group-limited choice: only experts of the best groups may be chosen.

    Args:
        count: attribute of the router that holds the number of groups.
        kept: attribute that holds how many stay.
        best: how many of a group's best experts score it (1 or 2).
        fill: what the scores of the other groups become.
    """

    count: str
    kept: str
    best: int
    fill: float


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which experts a router takes, given its scores.

    Args:
        score: name in ``SCORES`` of what is compared.
        bias: added for choosing only, or None.
        groups: group limit, or None.
        ordered: whether slots come best first (``torch.topk(sorted=True)``).
    """

    score: str
    bias: Place | None
    groups: Groups | None
    ordered: bool

    def choose(
        self, router: nn.Module, block: nn.Module, logits_TE: Tensor, k: int, allowed_TE: Tensor | None = None
    ) -> Tensor:
        """Ids (T, k) of the model's own choice among ``allowed_TE`` (T, E); E where too few are allowed.

        The numbers of the model decide as they are: ``torch.topk`` on its own scores, ties as it breaks them. Whether
        the others count in a softmax is the caller's to say (:func:`~moesaic.routing.routing.mask_logits`).
        """
        scores = SCORES[self.score](logits_TE)
        if self.bias is not None:
            bias = self.bias.read(router, block)
            assert isinstance(bias, Tensor)
            scores = scores + bias.reshape(-1).to(scores)
        if allowed_TE is not None:
            scores = scores.masked_fill(~allowed_TE, -torch.inf)
        if self.groups is not None:
            scores = _limit(scores, self.groups, router)
            if allowed_TE is not None:
                scores = scores.masked_fill(~allowed_TE, -torch.inf)
        top = torch.topk(scores, min(k, scores.shape[1]), dim=-1, sorted=self.ordered)
        return top.indices.masked_fill(top.values == -torch.inf, logits_TE.shape[1])


def _limit(scores_TE: Tensor, groups: Groups, router: nn.Module) -> Tensor:
    count, kept = getattr(router, groups.count), getattr(router, groups.kept)
    if count is None or kept is None:
        return scores_TE
    grouped = scores_TE.view(scores_TE.shape[0], count, -1)
    best = grouped.topk(min(groups.best, grouped.shape[-1]), dim=-1).values
    # A group with one allowed expert is scored by that one; a group with none can never win.
    score_TG = best.masked_fill(best == -torch.inf, 0.0).sum(-1)
    score_TG = score_TG.masked_fill((best == -torch.inf).all(-1), -torch.inf)
    keep = score_TG.topk(kept, dim=-1, sorted=False).indices
    out_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter(1, keep, False)
    return grouped.masked_fill(out_TG[..., None], groups.fill).flatten(1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a router turns logits and a choice into weights: score, gather, perhaps renormalise, scale.

    Args:
        score: name in ``SCORES``.
        renormalise: whether the chosen scores are divided by their sum.
        scale: factor, as it was when the rule was found.
        scale_place: where the factor lives, None for a constant.
        inverse_top_k: the factor is 1 / ``router.top_k``.
        expert_scale: a factor of each expert, or None.
        selection: how the experts are chosen, or None when that was not reproduced.
        probabilities: whether the router's first output holds probabilities instead of logits.
        top_k: experts that the router takes per row.
        order: of the norm that renormalises; 1 is the sum.
    """

    score: str
    renormalise: bool
    scale: float
    scale_place: Place | None
    inverse_top_k: bool
    expert_scale: Place | None
    selection: Selection | None
    probabilities: bool
    top_k: int
    order: float = 1.0

    def weigh(self, router: nn.Module, block: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weights (T, K) of the choice ``ids_TK``, without a factor that the block applies itself.

        An empty slot (id = number of columns) weighs 0.
        """
        weights = gather_slots(SCORES[self.score](logits_TE), ids_TK)
        if self.renormalise:
            total = weights.sum(-1, keepdim=True)
            if self.order != 1.0:
                total = torch.linalg.vector_norm(weights, self.order, dim=-1, keepdim=True)
            weights = weights / torch.where(total == 0, 1.0, total)
        if self.expert_scale is not None:
            each = self.expert_scale.read(router, block)
            assert isinstance(each, Tensor)
            weights = weights * gather_slots(each.reshape(1, -1).to(weights).expand(ids_TK.shape[0], -1), ids_TK)
        factor = self.factor(router, block)
        return weights if factor == 1.0 else weights * factor

    def factor(self, router: nn.Module, block: nn.Module) -> float:
        """The scale factor now."""
        if self.inverse_top_k:
            return 1.0 / float(Place("top_k").read(router, block))
        return self.scale if self.scale_place is None else float(self.scale_place.read(router, block))

    @property
    def score_function(self) -> str:
        """The name under which a Routing knows this score."""
        return self.score

    def full_logits(self, output: tuple[Any, ...]) -> Tensor:
        """All columns that :meth:`weigh` needs, from what the router returned: (T, at least E) logits."""
        first: Tensor = output[0].reshape(-1, output[0].shape[-1])
        return first.clamp(min=torch.finfo(first.dtype).tiny).log() if self.probabilities else first

    def beside(self, output: tuple[Any, ...]) -> dict[str, Tensor]:
        """What else the router decided, for a Routing's ``extras``; nothing for most."""
        return {}

    def beside_choice(self, router: nn.Module, block: nn.Module, full_TE: Tensor, ids_TK: Tensor) -> dict[str, Tensor]:
        """The same for another choice."""
        return {}

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.score.replace('_', ' ')} of the logits, top {self.top_k}"]
        parts.append("renormalised over the chosen" if self.renormalise else "not renormalised")
        if self.expert_scale is not None:
            parts.append(f"times {self.expert_scale.path} of each expert")
        if self.inverse_top_k:
            parts.append("divided by top_k")
        elif self.scale_place is not None:
            parts.append(f"times {self.scale_place.path} ({self.scale:g})")
        elif self.scale != 1.0:
            parts.append(f"times {self.scale:g}")
        if self.selection is None:
            parts.append("its way of choosing was not reproduced")
        else:
            if self.selection.bias is not None:
                parts.append(f"chosen with {self.selection.bias.path} added")
            if self.selection.groups is not None:
                parts.append("inside the best groups only")
        return ", ".join(parts)
