"""The decision of a router: a sparse matrix of rows by experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.routing.checks import checking
from moesaic.routing.dispatch import Dispatch

SCORE_FUNCTIONS = ("softmax", "sigmoid", "relu", "sqrt_softplus")


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "sqrt_softplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """Who goes where, and with what weight. An immutable value: whoever changes it makes a new one.

    One row is one decision, usually a token. A row may use fewer than K experts: an empty slot holds the id E (the
    number of experts) and the weight 0. Padded rows have only empty slots.

    Args:
        expert_ids_TK: (T, K) int64 expert ids; E marks an empty slot.
        weights_TK: (T, K) combine weights, the model's scale factor included; 0 in empty slots.
        num_experts: E.
        logits_TE: (T, E) scores before normalisation, or None when they were never formed; -inf for an expert that was
            not allowed.
        token_mask_T: (T,) bool, False for padded rows, or None when every row is real.
        losses: name -> scalar, added by the router (its own terms) and by the layer.
        extras: what a method wants to carry along.
        score_function: how logits become probabilities: ``"softmax"``, or ``"sigmoid"`` and ``"relu"``, both normalised
            to sum 1.

    Raises:
        ValueError: shapes or dtypes that do not fit; with checks on also ids outside [0, E], weight in an empty slot,
            a filled slot in a padded row, weights that are not finite.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    num_experts: int
    logits_TE: Tensor | None = None
    token_mask_T: Tensor | None = None
    losses: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    score_function: str = "softmax"

    def __post_init__(self) -> None:
        ids, weights, experts = self.expert_ids_TK, self.weights_TK, self.num_experts
        if type(experts) is not int or experts < 1:  # an int in range, as nearly always, costs no call
            experts = check_count("num_experts", experts)
            object.__setattr__(self, "num_experts", experts)
        if ids.dim() != 2 or ids.dtype != torch.int64:
            raise ValueError(f"expert_ids_TK must be int64 of shape (T, K), got {ids.dtype} {tuple(ids.shape)}")
        if weights.shape != ids.shape or not weights.dtype.is_floating_point:
            raise ValueError(
                f"weights_TK must be floating point of shape {tuple(ids.shape)} like expert_ids_TK,"
                f" got {weights.dtype} {tuple(weights.shape)}"
            )
        if self.logits_TE is not None and self.logits_TE.shape != (ids.shape[0], experts):
            raise ValueError(
                f"logits_TE must have shape ({ids.shape[0]}, {experts}), got {tuple(self.logits_TE.shape)}"
            )
        mask = self.token_mask_T
        if mask is not None and (mask.shape != ids.shape[:1] or mask.dtype != torch.bool):
            raise ValueError(
                f"token_mask_T must be bool of shape ({ids.shape[0]},), got {mask.dtype} {tuple(mask.shape)}"
            )
        if self.score_function not in SCORE_FUNCTIONS:
            raise ValueError(f"score_function must be one of {SCORE_FUNCTIONS}, got {self.score_function!r}")
        if checking(ids):
            self._check_contents()
        object.__setattr__(self, "losses", MappingProxyType(dict(self.losses)))
        object.__setattr__(self, "extras", MappingProxyType(dict(self.extras)))

    def _check_contents(self) -> None:
        ids, weights, experts = self.expert_ids_TK, self.weights_TK.detach(), self.num_experts
        if ids.numel() == 0:
            return
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high > experts:
            bad = low if low < 0 else high
            row = int(torch.nonzero((ids == bad).any(1))[0])
            raise ValueError(
                f"expert_ids_TK holds {bad} in row {row}; allowed are 0..{experts - 1} and {experts} for an empty slot"
                " (convert other tools' -1 to it)"
            )
        empty = ids == experts
        if bool((empty & (weights != 0)).any()):
            row = int(torch.nonzero((empty & (weights != 0)).any(1))[0])
            raise ValueError(f"weights_TK is not 0 in an empty slot of row {row}")
        if not bool(torch.isfinite(weights).all()):
            row = int(torch.nonzero(~torch.isfinite(weights).all(1))[0])
            raise ValueError(f"weights_TK is not finite in row {row}: {weights[row].tolist()}")
        if self.token_mask_T is not None and bool((~empty[~self.token_mask_T]).any()):
            raise ValueError("a padded row (token_mask_T False) has a filled slot; padded rows hold only empty slots")

    @classmethod
    def from_dense(
        cls,
        weights_TE: Tensor,
        mask_TE: Tensor | None = None,
        *,
        logits_TE: Tensor | None = None,
        token_mask_T: Tensor | None = None,
        losses: Mapping[str, Tensor] | None = None,
        extras: Mapping[str, Any] | None = None,
        score_function: str = "softmax",
    ) -> Routing:
        """The routing whose dense form is ``weights_TE``; keeps the gradient.

        Args:
            weights_TE: (T, E) combine weights.
            mask_TE: (T, E) bool, which experts are used; by default those with a weight other than 0. A used expert may
                have weight 0 (it counts in the load); an unused one's weight is ignored.
            logits_TE: see the class.
            token_mask_T: see the class; padded rows' entries are ignored.
            losses: see the class.
            extras: see the class.
            score_function: see the class.

        Raises:
            ValueError: shapes that do not fit.
        """
        if weights_TE.dim() != 2:
            raise ValueError(f"weights_TE must have shape (T, E), got {tuple(weights_TE.shape)}")
        mask_TE = weights_TE.detach() != 0 if mask_TE is None else mask_TE
        if mask_TE.shape != weights_TE.shape or mask_TE.dtype != torch.bool:
            raise ValueError(
                f"mask_TE must be bool of shape {tuple(weights_TE.shape)}, got {mask_TE.dtype} {tuple(mask_TE.shape)}"
            )
        if token_mask_T is not None:
            mask_TE = mask_TE & token_mask_T[:, None]
        num_experts = weights_TE.shape[1]
        ids_TK = ids_of_mask(mask_TE)
        return cls(
            ids_TK,
            gather_slots(weights_TE, ids_TK),
            num_experts,
            logits_TE,
            token_mask_T,
            losses or {},
            extras or {},
            score_function,
        )

    def take(self, row_T: Tensor) -> Routing:
        """Rows ``row_T`` (int64) in that order: a slice, or a decision per group spread over its tokens."""
        return dataclasses.replace(
            self,
            expert_ids_TK=self.expert_ids_TK[row_T],
            weights_TK=self.weights_TK[row_T],
            logits_TE=None if self.logits_TE is None else self.logits_TE[row_T],
            token_mask_T=None if self.token_mask_T is None else self.token_mask_T[row_T],
        )

    def replace(self, **changes: Any) -> Routing:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def detach(self) -> Routing:
        """The same decisions without gradient."""
        return dataclasses.replace(
            self,
            weights_TK=self.weights_TK.detach(),
            logits_TE=None if self.logits_TE is None else self.logits_TE.detach(),
            losses={name: value.detach() for name, value in self.losses.items()},
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.expert_ids_TK.shape[0])

    @property
    def slots(self) -> int:
        """K, the most experts that a row can use here."""
        return int(self.expert_ids_TK.shape[1])

    @cached_property
    def filled_TK(self) -> Tensor:
        """(T, K) bool, slots that hold an expert."""
        return self.expert_ids_TK < self.num_experts

    @cached_property
    def weights_TE(self) -> Tensor:
        """(T, E) dense combine weights."""
        dense = self.weights_TK.new_zeros((self.num_rows, self.num_experts + 1))
        return dense.scatter_add(1, self.expert_ids_TK, self.weights_TK)[:, : self.num_experts]

    @cached_property
    def mask_TE(self) -> Tensor:
        """(T, E) bool, which experts a row uses."""
        dense = torch.zeros((self.num_rows, self.num_experts + 1), dtype=torch.bool, device=self.expert_ids_TK.device)
        return dense.scatter(1, self.expert_ids_TK, True)[:, : self.num_experts]

    @cached_property
    def probs_TE(self) -> Tensor:
        """(T, E) probabilities, each row summing to 1; to 0 in padded rows and where every ReLU or sigmoid score is 0.

        Raises:
            ValueError: the router formed no logits.
        """
        if self.logits_TE is None:
            raise ValueError(
                "this routing carries no logits_TE (its router never forms them), so it has no probabilities"
            )
        logits = self.logits_TE.float() if self.logits_TE.dtype in (torch.bfloat16, torch.float16) else self.logits_TE
        padded = None if self.token_mask_T is None else ~self.token_mask_T[:, None]
        if padded is not None:  # before the softmax, so that NaN in padding reaches no gradient either
            logits = logits.masked_fill(padded, 0.0)
        if self.score_function == "softmax":
            probs = logits.softmax(-1)
        else:
            scores = _SCORES[self.score_function](logits)
            total = scores.sum(-1, keepdim=True)
            probs = scores / torch.where(total > 0, total, 1.0)
        return probs if padded is None else probs.masked_fill(padded, 0.0)

    @cached_property
    def load_E(self) -> Tensor:
        """(E,) int64 number of decisions that use each expert."""
        # Not histc: it has no integer kernel on the CPU and no deterministic one elsewhere.
        return torch.bincount(self.expert_ids_TK.reshape(-1), minlength=self.num_experts + 1)[: self.num_experts]

    @cached_property
    def importance_E(self) -> Tensor:
        """(E,) sum of combine weights that each expert receives."""
        return self.weights_TE.sum(0)

    @cached_property
    def active_T(self) -> Tensor:
        """(T,) int64 number of experts that each row uses."""
        return self.filled_TK.sum(1)

    @cached_property
    def real_T(self) -> Tensor:
        """(T,) bool, rows that are not padding."""
        if self.token_mask_T is not None:
            return self.token_mask_T
        return torch.ones(self.num_rows, dtype=torch.bool, device=self.expert_ids_TK.device)

    @cached_property
    def entropy_T(self) -> Tensor:
        """(T,) entropy of each row's probabilities in nats; 0 in padded rows."""
        return row_entropy(self.probs_TE)

    @property
    def entropy(self) -> Tensor:
        """Mean entropy over real rows in nats; 0 when there are none."""
        mean: Tensor = self.entropy_T.sum() / self.real_T.sum().clamp(min=1)
        return mean

    @cached_property
    def dispatch(self) -> Dispatch:
        """The filled slots sorted by expert."""
        return Dispatch.of(self.expert_ids_TK, self.num_experts)


def ids_of_mask(mask_TE: Tensor) -> Tensor:
    """Expert ids (T, K) of a choice given as a (T, E) bool mask, ascending in a row, K the most that any row uses."""
    num_rows, num_experts = mask_TE.shape
    slots = int(mask_TE.sum(1).max()) if num_rows else 0
    # A stable sort of "unused" puts each row's experts first, in ascending order.
    ids_TK = torch.argsort((~mask_TE).to(torch.int8), dim=1, stable=True)[:, :slots]
    return ids_TK.masked_fill(~mask_TE.gather(1, ids_TK), num_experts)


def gather_slots(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Scores of the chosen experts (T, K), exactly 0 (and without gradient) in empty slots."""
    num_experts = scores_TE.shape[1]
    picked = scores_TE.gather(1, ids_TK.clamp(max=num_experts - 1))
    return torch.where(ids_TK < num_experts, picked, picked.new_zeros(()))


def mask_logits(logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
    """``logits_TE`` with -inf where ``allowed_TE`` is False; a row in which nothing is allowed stays as it was."""
    return logits_TE.masked_fill(~allowed_TE & allowed_TE.any(1, keepdim=True), -torch.inf)


def row_entropy(probs_TE: Tensor) -> Tensor:
    """(T,) entropy of each row in nats, with a finite gradient also where a probability is exactly 0."""
    log_TE = probs_TE.clamp(min=torch.finfo(probs_TE.dtype).tiny).log()
    return -(probs_TE * log_TE).sum(-1)
