"""Weight rules in which a weight is more than one score, gathered and scaled: picks in sequence, a sum with others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.adapters.rules import SCORES, Place, Rule
from moesaic.routing.routing import gather_slots

SHARED = "shared_weights"  # under which a Routing carries the weights of experts that every row uses


@dataclasses.dataclass(frozen=True)
class SequentialRule(Rule):
    """Picks one after the other, each weighed by a softmax of its own (SparseMixer, arXiv:2409.12136, in evaluation).

    .. math:: w_j = \\mathrm{softmax}(s_i : i \\notin P_j,\\; (m_j - s_i) / \\max(|s_i|, m_j) \\le 2 \\epsilon)_{p_j}

    with :math:`P_j` the picks before :math:`p_j` and :math:`m_j` the largest score outside :math:`P_j`. A pick that the
    margin would leave out counts in its own softmax, so that any choice has a weight.

    Args:
        margin: where epsilon lives.
    """

    margin: Place = dataclasses.field(default_factory=lambda: Place("router_jitter_noise"))

    def weigh(self, router: nn.Module, block: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """See :class:`Rule`; the order of the slots is the order of the picks."""
        epsilon = float(self.margin.read(router, block))
        experts = logits_TE.shape[1]
        left_TE = torch.ones_like(logits_TE, dtype=torch.bool)
        weights = []
        for slot in range(ids_TK.shape[1]):
            id_T1 = ids_TK[:, slot : slot + 1]
            real_T1 = id_T1 < experts
            with torch.no_grad():
                best_T1 = logits_TE.masked_fill(~left_TE, -torch.inf).amax(1, keepdim=True)
                far_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1) > 2 * epsilon
                own_TE = torch.zeros_like(far_TE).scatter(1, id_T1.clamp(max=experts - 1), real_T1)
            scores_TE = logits_TE.masked_fill(~own_TE & (far_TE | ~left_TE), -torch.inf)
            weights.append(gather_slots(scores_TE.softmax(-1), id_T1))
            left_TE = left_TE & ~own_TE
        if not weights:
            return logits_TE.new_zeros(ids_TK.shape)
        factor = self.factor(router, block)
        return torch.cat(weights, 1) * factor if factor != 1.0 else torch.cat(weights, 1)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.top_k} picks in sequence, each by softmax of the logits within {self.margin.path} of the largest"
            " left"
        )


@dataclasses.dataclass(frozen=True)
class SharedSumRule(Rule):
    """Scores of the chosen and of experts that every row uses, divided by their common sum.

    The shared experts' logits stand in the columns behind the routed ones; a Routing carries the shared weights in
    ``extras["shared_weights"]`` (T, n), and those of another choice follow its sum.

    Args:
        shared: n, how many.
        scales: factors, each read where the router keeps it.
    """

    shared: int = 0
    scales: tuple[Place, ...] = ()

    def full_logits(self, output: tuple[Any, ...]) -> Tensor:
        """Routed logits, and behind them those of the shared experts, found from the weights that these got."""
        first: Tensor = output[0].reshape(-1, output[0].shape[-1])
        routed = gather_slots(SCORES[self.score](first), output[2].reshape(first.shape[0], -1)).sum(1, keepdim=True)
        given = output[1].reshape(first.shape[0], -1).to(first.dtype).sum(1, keepdim=True)
        shared = output[3].reshape(first.shape[0], -1).to(first.dtype) * (routed / given)
        return torch.cat([first, torch.logit(shared, eps=torch.finfo(first.dtype).tiny)], 1)

    def beside(self, output: tuple[Any, ...]) -> dict[str, Tensor]:
        """Weights of the shared experts."""
        return {SHARED: output[3].reshape(-1, self.shared)}

    def beside_choice(self, router: nn.Module, block: nn.Module, full_TE: Tensor, ids_TK: Tensor) -> dict[str, Tensor]:
        """Weights of the shared experts beside another choice."""
        _, shared = self._both(router, block, full_TE, ids_TK)
        return {SHARED: shared}

    def weigh(self, router: nn.Module, block: nn.Module, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """See :class:`Rule`; ``logits_TE`` has the shared experts' columns behind the routed ones.

        Raises:
            ValueError: without these columns a choice cannot be weighed.
        """
        return self._both(router, block, logits_TE, ids_TK)[0]

    def factor(self, router: nn.Module, block: nn.Module) -> float:
        """The product of the factors now."""
        product = self.scale if not self.scales else 1.0
        for place in self.scales:
            product *= float(place.read(router, block))
        return product

    def _both(self, router: nn.Module, block: nn.Module, full_TE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        experts = int(getattr(router, "num_experts", full_TE.shape[1] - self.shared))
        if full_TE.shape[1] != experts + self.shared:
            raise ValueError(
                f"logits_TE has {full_TE.shape[1]} columns; the weights of this router share their sum with"
                f" {self.shared} experts that every row uses, so {experts} + {self.shared} are needed: use call.choose"
                " inside override_routing, which has them"
            )
        scores = SCORES[self.score](full_TE)
        routed, shared = gather_slots(scores[:, :experts], ids_TK.clamp(max=experts)), scores[:, experts:]
        total = routed.sum(1, keepdim=True) + shared.sum(1, keepdim=True)
        scale = self.factor(router, block) / torch.where(total == 0, 1.0, total)
        return routed * scale, shared * scale

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.score} of the logits, top {self.top_k}", f"renormalised with {self.shared} shared experts"]
        parts += [f"times {place.path}" for place in self.scales]
        if self.selection is not None and self.selection.bias is not None:
            parts.append(f"chosen with {self.selection.bias.path} added")
        return ", ".join(parts)
