"""What a model's routers say about a text, as a vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.routing import Context, Routing

HOW = ("mean", "last")
OF = ("probs", "weights")


def pooled_routing_embedding(
    routings: Sequence[Routing], context: Context, how: str = "mean", *, of: str = "probs"
) -> Tensor:
    """Routing weights as an embedding of each sequence, the protocol that USMoE (arXiv:2503.22996) is measured by.

    The layers' rows are pooled over the real tokens of a sequence and put side by side.

    Args:
        routings: one a layer, over the same rows (those of :func:`~moesaic.models.record_routing`, or of a model's
            output).
        context: its ``group_T`` says which sequence a row belongs to, its mask which rows are real.
        how: ``"mean"`` over a sequence's tokens, or its ``"last"`` token.
        of: ``"probs"``, the softmax over all experts, or ``"weights"``, the combine weights of those that were chosen.

    Returns:
        (sequences, sum of the layers' E), sequences in the order of their numbers; 0 for one of padding only.

    Raises:
        ValueError: unknown names, no routing, routings of other rows, a context without groups.
    """
    if how not in HOW or of not in OF:
        raise ValueError(f"how must be one of {HOW} and of one of {OF}, got {how!r} and {of!r}")
    if not routings:
        raise ValueError("routings is empty: give one Routing a layer")
    context.require(("group_T",), "pooled_routing_embedding")
    group_T = context.group_T
    assert group_T is not None
    for routing in routings:
        if routing.num_rows != group_T.shape[0]:
            raise ValueError(f"routings have {routing.num_rows} rows and the context {group_T.shape[0]}")
    values_TC = torch.cat([routing.probs_TE if of == "probs" else routing.weights_TE for routing in routings], 1)
    real_T = torch.ones_like(group_T, dtype=torch.bool) if context.token_mask_T is None else context.token_mask_T
    names, index_T = torch.unique(group_T, return_inverse=True)
    if how == "last":
        place_T = torch.arange(1, len(index_T) + 1, device=index_T.device) * real_T
        last_G = place_T.new_zeros(names.numel()).scatter_reduce(0, index_T, place_T, "amax")
        return values_TC[last_G.clamp(min=1) - 1] * (last_G > 0)[:, None]
    kept_TC = values_TC.masked_fill(~real_T[:, None], 0.0)
    total_GC = kept_TC.new_zeros((names.numel(), values_TC.shape[1])).index_add(0, index_T, kept_TC)
    count_G = torch.zeros_like(names).index_add(0, index_T, real_T.long())
    return total_GC / count_G.clamp(min=1)[:, None]
