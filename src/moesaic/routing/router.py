"""Contract 1: a router looks at tokens and returns a Routing."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.routing.checks import checking
from moesaic.routing.context import Context
from moesaic.routing.routing import Routing, mask_logits
from moesaic.routing.state import StepState


class Router(StepState):
    """Base of all routers: ``score -> choose -> weigh``, which ``forward`` composes.

    Choosing and weighing are separate so that whoever changes the choice gets the weights this router would have given.
    Scores, selection and weights are computed in float32 (float64 inputs stay float64) whatever the model's dtype, and
    the router's own parameters stay in it. Ties go to the lower index.

    Args:
        dim: model width D.
        num_experts: E.

    Shapes:
        x_TD, Context -> Routing with T rows (one row a group where ``per_group`` is true).

    Raises:
        ValueError: non-positive sizes; ``x_TD`` of another width; scores that are not finite; a context of another
            length or without what ``needs`` names.
    """

    needs: tuple[str, ...] = ()
    per_group: ClassVar[bool] = False
    score_function: str = "softmax"

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.dim = check_count("dim", dim)
        self.num_experts = check_count("num_experts", num_experts)
        self.layer_name = ""  # set by the model, so that an error can say where
        self.layer_index = 0  # set by the model, so that random draws of different layers differ

    # The three steps -------------------------------------------------------------------------------------------------
    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) before normalisation, float32."""
        raise NotImplementedError(f"{type(self).__name__} does not define score")

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """Expert ids (T, K) int64, E in empty slots.

        Args:
            logits_TE: scores.
            context: see :class:`Context`.
            allowed_TE: (T, E) bool; experts that may be chosen, None for all. The choice is that of a router without
                the others, whose logits do not count (:meth:`restrict`). A slot without an allowed expert stays empty.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define choose")

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """Combine weights (T, K) that this router gives to the choice ``ids_TK``, whoever made it; 0 in empty slots."""
        raise NotImplementedError(f"{type(self).__name__} does not define weigh")

    def restrict(self, logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
        """The logits (T, E) that this router would have formed without the experts outside ``allowed_TE``.

        The others' are -inf, so no score counts them and weights are those of a router without them. A row in which
        nothing is allowed stays as it was. A router whose logits depend on each other (standardised ones) says here
        what becomes of the rest; restricting twice is restricting once.
        """
        return mask_logits(logits_TE, allowed_TE)

    # Composition -----------------------------------------------------------------------------------------------------
    def forward(self, x_TD: Tensor, context: Context | None = None) -> Routing:
        """Route ``x_TD`` (T, D)."""
        context = self.check_input(x_TD, context)
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            if context.token_mask_T is not None:  # what padding holds, NaN included, reaches no score and no gradient
                x_TD = x_TD.masked_fill(~context.token_mask_T[:, None], 0.0)
            logits_TE = self.score(x_TD, context)
            self.check_scores(logits_TE, context)
            ids_TK = self.choose(logits_TE, context)
            routing = self.decide(logits_TE, ids_TK, context)
            if self.counting():
                self.observe(routing)
        return routing

    def decide(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Routing:
        """The Routing of a choice: padded rows emptied, weighed by this router, with its own losses.

        Args:
            logits_TE: (T, E) scores.
            ids_TK: (T, K) int64 choice, E in empty slots.
            context: see :class:`Context`.
        """
        if context.token_mask_T is not None:
            ids_TK = ids_TK.masked_fill(~context.token_mask_T[:, None], self.num_experts)
        weights_TK = self.weigh(logits_TE, ids_TK, context)
        routing = Routing(
            ids_TK,
            weights_TK,
            self.num_experts,
            logits_TE,
            context.token_mask_T,
            score_function=self.score_function,
        )
        own = self.own_losses(routing)
        return routing.replace(losses=own) if own else routing

    def own_losses(self, routing: Routing) -> dict[str, Tensor]:
        """Loss terms that belong to this router itself (ReMoE's L1); none by default."""
        return {}

    def observe(self, routing: Routing) -> None:
        """Gather statistics for :meth:`end_step`; called in training mode, in the first pass only."""

    def check_causal(self) -> None:
        """Raise ValueError when decisions may depend on later tokens; a causal model asks at construction."""

    # Doors -----------------------------------------------------------------------------------------------------------
    def check_input(self, x_TD: Tensor, context: Context | None) -> Context:
        """Check width, rows and needs; returns the context, an empty one for None."""
        who = f"{type(self).__name__}{f' of {self.layer_name}' if self.layer_name else ''}"
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(f"{who}: x_TD must have shape (T, {self.dim}), got {tuple(x_TD.shape)}")
        context = Context() if context is None else context
        context.check_rows(x_TD.shape[0], who)
        context.require(self.needs, who)
        return context

    def check_scores(self, logits_TE: Tensor, context: Context) -> None:
        """Refuse scores that are not finite, naming layer and row; padded rows may hold anything."""
        if not checking(logits_TE) or logits_TE.numel() == 0:
            return
        finite_T = torch.isfinite(logits_TE.detach()).all(1)
        if context.token_mask_T is not None:
            finite_T = finite_T | ~context.token_mask_T
        if not bool(finite_T.all()):
            row = int(torch.nonzero(~finite_T)[0])
            raise ValueError(
                f"scores are not finite in layer {self.layer_name or '(unnamed)'}, row {row}, router"
                f" {type(self).__name__}: {logits_TE[row].tolist()[:8]}; its input or weights hold NaN or inf"
            )


def top_k_lower_index(scores_TE: Tensor, k: int) -> Tensor:
    """Ids of the k best scores in each row, best first; equal ones by index (``torch.topk`` promises no order)."""
    return torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :k]
