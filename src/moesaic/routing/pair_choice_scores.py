"""The score of a row-expert pair: how the row ranks its experts, mixed with how the expert values the row (USMoE)."""

from __future__ import annotations

import torch
from torch import Tensor

EXPERT_SIDES = ("sigmoid", "token_softmax")


def unified_score(
    logits_TE: Tensor,
    rate: float = 0.5,
    expert_side: str = "sigmoid",
    *,
    group_T: Tensor | None = None,
    token_mask_T: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    r"""The unified score of USMoE, arXiv:2503.22996.

    .. math:: S = (1 - r)\, \mathrm{softmax}_e(A) + r\, f(A), \qquad f(A) = \tfrac{2}{E}\, \sigma(A)

    The softmax lets experts compete inside a row; the sigmoid looks at each pair alone, so that a row whose logits are
    all high can win several experts and one whose logits are all low few or none. Both are 1 / E at logits 0. Experts
    whose logit is -inf do not count in E and score 0.

    Args:
        logits_TE: A, (T, E).
        rate: r in [0, 1].
        expert_side: f: ``"sigmoid"`` as above, or ``"token_softmax"``, the softmax over the rows of each group.
        group_T: (T,) int64 group of each row, numbered from 0, for ``"token_softmax"``; None for one group.
        token_mask_T: (T,) bool, False for padded rows, which take no part in the softmax over rows.
        check: refuse logits that are not finite (-inf too).

    Returns:
        (T, E), not negative; float32 for logits of less.

    Raises:
        ValueError: a rate outside [0, 1], an unknown side, logits of another shape or not finite, groups of another
            length.
    """
    check_rate(rate)
    if expert_side not in EXPERT_SIDES:
        raise ValueError(f"expert_side must be one of {EXPERT_SIDES}, got {expert_side!r}")
    if logits_TE.dim() != 2:
        raise ValueError(f"logits_TE must have shape (T, E), got {tuple(logits_TE.shape)}")
    if group_T is not None and group_T.shape != logits_TE.shape[:1]:
        raise ValueError(f"group_T must have shape ({logits_TE.shape[0]},), got {tuple(group_T.shape)}")
    if logits_TE.dtype in (torch.bfloat16, torch.float16):
        logits_TE = logits_TE.float()
    if token_mask_T is not None:
        logits_TE = logits_TE.masked_fill(~token_mask_T[:, None], 0.0)
    if check and not bool(torch.isfinite(logits_TE.detach()).all()):
        raise ValueError("logits_TE is not finite: the scores of a row with NaN or inf mean nothing")
    row_side_TE = logits_TE.softmax(-1)
    if rate == 0:
        return row_side_TE
    if expert_side == "sigmoid":
        count_T1 = (logits_TE != -torch.inf).sum(-1, keepdim=True).to(logits_TE.dtype)
        expert_side_TE = logits_TE.sigmoid() * (2.0 / count_T1)
    else:
        expert_side_TE = _softmax_over_rows(logits_TE, group_T, token_mask_T)
    return (1 - rate) * row_side_TE + rate * expert_side_TE


def check_rate(rate: float) -> None:
    """Refuse a mixing rate outside [0, 1].

    Raises:
        ValueError: naming it.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie in [0, 1], got {rate}")


def _softmax_over_rows(logits_TE: Tensor, group_T: Tensor | None, token_mask_T: Tensor | None) -> Tensor:
    rows, experts = logits_TE.shape
    index_T = torch.zeros(rows, dtype=torch.int64, device=logits_TE.device) if group_T is None else group_T
    groups = int(index_T.max()) + 1 if rows else 0
    index_TE = index_T[:, None].expand(rows, experts)
    if token_mask_T is not None:
        logits_TE = logits_TE.masked_fill(~token_mask_T[:, None], -torch.inf)
    lowest = logits_TE.new_full((groups, experts), -torch.inf)
    highest_GE = lowest.scatter_reduce(0, index_TE, logits_TE.detach(), "amax")
    highest_GE = highest_GE.masked_fill(highest_GE == -torch.inf, 0.0)  # a group of padding only
    e_TE = (logits_TE - highest_GE[index_T]).exp()
    total_GE = e_TE.new_zeros((groups, experts)).index_add(0, index_T, e_TE)
    return e_TE / total_GE.clamp(min=torch.finfo(e_TE.dtype).tiny)[index_T]
