"""A feed-forward net computed as attention with the softmax undone, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.formats.arguments import check_count

# Rows and hidden units of one tile of scores: 1 MiB of float32, which stays in cache.
TILE_ROWS, TILE_HIDDEN = 1024, 256
Span = tuple[int, int, int]


def ffn_as_attention(x_NC: Tensor, keys_FC: Tensor, values_FO: Tensor, *, tile: int = TILE_HIDDEN) -> Tensor:
    r"""A two-layer GELU net as attention (arXiv:2602.04870).

    Rows of the first matrix are keys :math:`a_i`, rows of the second values :math:`b_i`. With scores
    :math:`s_i = a_i^\top x` and :math:`s_i' = \log(1 + \mathrm{gelu}(s_i))`, softmax attention gives
    :math:`\sum_i (1 + \mathrm{gelu}(s_i))\, b_i / Z` and its log-sum-exp :math:`\log Z`, hence

    .. math:: \sum_i \mathrm{gelu}(s_i)\, b_i = e^{\mathrm{lse}} \cdot \mathrm{attention}(x) - \sum_i b_i.

    gelu is never below -0.17, so the logarithm exists. Any attention kernel with a score transform can run it; this one
    goes over tiles of hidden units with a running maximum, and keeps x and the two matrices for the backward, no hidden
    activation.

    Args:
        x_NC: (N, C) rows.
        keys_FC: (F, C).
        values_FO: (F, O).
        tile: hidden units at a time.

    Returns:
        (N, O), :math:`\mathrm{gelu}(x A^\top) B`.

    Raises:
        ValueError: shapes that do not fit, a tile below 1.
    """
    return spans_as_attention(x_NC, keys_FC[None], values_FO[None], [(0, 0, x_NC.shape[0])], tile=tile)


def spans_as_attention(
    x_NC: Tensor, keys_EFC: Tensor, values_EFO: Tensor, spans: Sequence[Span], *, tile: int = TILE_HIDDEN
) -> Tensor:
    """:func:`ffn_as_attention` for rows of several experts: the rows of a span see their own expert's units only.

    Args:
        x_NC: (N, C) rows.
        keys_EFC: (E, F, C).
        values_EFO: (E, F, O).
        spans: (expert, first row, last row + 1); rows in no span give zero.
        tile: hidden units at a time.

    Raises:
        ValueError: shapes that do not fit, a tile below 1.
    """
    fits = x_NC.dim() == 2 and keys_EFC.dim() == values_EFO.dim() == 3 and keys_EFC.shape[:2] == values_EFO.shape[:2]
    if not fits or x_NC.shape[1] != keys_EFC.shape[2]:
        raise ValueError(
            "x, keys and values must be (N, C), (F, C) and (F, O), the last two with an axis of experts before,"
            f" got {tuple(x_NC.shape)}, {tuple(keys_EFC.shape)}, {tuple(values_EFO.shape)}"
        )
    check_count("tile", tile)
    pieces = [
        (expert, start, min(start + TILE_ROWS, last))
        for expert, first, last in spans
        for start in range(first, last, TILE_ROWS)
    ]
    y_NO: Tensor = _SpansAsAttention.apply(x_NC, keys_EFC, values_EFO, pieces, tile)  # type: ignore[no-untyped-call]
    return y_NO


def attention_of_ffn(x_NC: Tensor, keys_FC: Tensor, values_FO: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """The attention itself: outputs (N, O) and log-sum-exp (N,), over tiles of keys with a running maximum."""
    best_N1 = x_NC.new_full((x_NC.shape[0], 1), -torch.inf)
    total_N1 = x_NC.new_zeros((x_NC.shape[0], 1))
    sum_NO = x_NC.new_zeros((x_NC.shape[0], values_FO.shape[1]))
    for keys, values in zip(torch.split(keys_FC, tile), torch.split(values_FO, tile), strict=True):
        scores = torch.log1p(F.gelu(x_NC @ keys.t()))
        new_N1 = torch.maximum(best_N1, scores.amax(1, keepdim=True))
        parts = torch.exp(scores - new_N1)
        shrink_N1 = torch.exp(best_N1 - new_N1)
        total_N1 = total_N1 * shrink_N1 + parts.sum(1, keepdim=True)
        sum_NO = (sum_NO * shrink_N1).addmm_(parts, values)
        best_N1 = new_N1
    return sum_NO / total_N1, (best_N1 + total_N1.log())[:, 0]


class _SpansAsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, keys_EFC: Tensor, values_EFO: Tensor, spans: Sequence[Span], tile: int
    ) -> Tensor:
        y_NO = x_NC.new_zeros((x_NC.shape[0], values_EFO.shape[2]))
        sums_EO = values_EFO.sum(1)
        for expert, first, last in spans:
            mean, lse = attention_of_ffn(x_NC[first:last], keys_EFC[expert], values_EFO[expert], tile)
            torch.sub(mean * lse.exp()[:, None], sums_EO[expert], out=y_NO[first:last])
        ctx.spans, ctx.tile = spans, tile
        ctx.save_for_backward(x_NC, keys_EFC, values_EFO)
        return y_NO

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, keys_EFC, values_EFO = ctx.saved_tensors
        dx, dkeys, dvalues = torch.zeros_like(x_NC), torch.zeros_like(keys_EFC), torch.zeros_like(values_EFO)
        width = keys_EFC.shape[1]
        for expert, first, last in ctx.spans:
            x, dy = x_NC[first:last], dy_NO[first:last]
            for unit in range(0, width, ctx.tile):
                part = slice(unit, unit + ctx.tile)
                keys, values = keys_EFC[expert, part], values_EFO[expert, part]
                scores = x @ keys.t()
                dvalues[expert, part].addmm_(F.gelu(scores).t(), dy)
                dscores = torch.ops.aten.gelu_backward(dy @ values.t(), scores)
                dkeys[expert, part].addmm_(dscores.t(), x)
                dx[first:last].addmm_(dscores, keys)
        return dx, dkeys, dvalues, None, None
