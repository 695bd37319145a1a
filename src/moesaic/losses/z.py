"""Router z-loss: logits should stay small."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.losses.base import RoutingLoss
from moesaic.routing import Context, Routing


def z_loss(routing: Routing) -> Tensor:
    r"""Router z-loss of ST-MoE, arXiv:2202.08906.

    .. math:: L = \frac{1}{T} \sum_t \Bigl(\log \sum_e e^{\ell_{t,e}}\Bigr)^2

    over the T real rows.

    Args:
        routing: needs logits.

    Returns:
        A scalar; 0 without real rows.

    Raises:
        ValueError: no logits.
    """
    logits_TE = routing.logits_TE
    if logits_TE is None:
        raise ValueError("z_loss needs logits_TE, and this routing carries none (its router never forms them)")
    if logits_TE.dtype in (torch.bfloat16, torch.float16):
        logits_TE = logits_TE.float()
    if routing.token_mask_T is not None:  # before the sum, so that NaN in padding reaches no gradient
        logits_TE = logits_TE.masked_fill(~routing.token_mask_T[:, None], 0.0)
    square_T = logits_TE.logsumexp(-1).square()
    if routing.token_mask_T is not None:
        square_T = square_T.masked_fill(~routing.token_mask_T, 0.0)
    return square_T.sum() / routing.real_T.sum().clamp(min=1)


class ZLoss(RoutingLoss):
    """:func:`z_loss` of each forward, as a part of a layer.

    Args:
        coefficient: see :class:`RoutingLoss`; 0.001 in the paper.
    """

    name = "z"

    def __init__(self, coefficient: float = 1e-3) -> None:
        super().__init__(coefficient)

    def value(self, routing: Routing, context: Context) -> Tensor:
        """The loss of this forward."""
        return z_loss(routing)
