"""The k best experts of each row without a matrix of rows by experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.routing.float_keys import pack, unpack_ids

# Rows and experts of one block of scores: 1 MiB of float32, which stays in cache.
TILE_EXPERTS, TILE_ROWS = 128, 2048


def streaming_top_k(
    x_HTC: Tensor,
    keys_HEC: Tensor,
    top_k: int,
    bias_HE: Tensor | None = None,
    *,
    tile: int = TILE_EXPERTS,
) -> tuple[Tensor, Tensor]:
    r"""IO-aware routing (arXiv:2602.04870): top-k of :math:`x_h R_h^\top + b_h` in memory O(T k).

    Experts come in tiles; each tile's scores join the k best so far and only the k best stay. The exact result of the
    dense computation, best first, equal scores to the lower id. For the backward x, R and the k ids are kept, no score:

    .. math:: dx_t = \sum_j g_{t,j} R_{e_j}, \qquad dR_e = \sum_{t, j: e_j = e} g_{t,j} x_t

    and nothing flows to experts that were not chosen, nor to the bias.

    Args:
        x_HTC: (H, T, C) rows of each head, float32 (or float64).
        keys_HEC: (H, E, C) a vector an expert, of the same dtype.
        top_k: k.
        bias_HE: (H, E) added for choosing only; the values returned are without it.
        tile: experts at a time.

    Returns:
        Values (H, T, k) with gradient, and ids (H, T, k) int64 in [0, E).

    Raises:
        ValueError: shapes or dtypes that do not fit, k outside [1, E], a tile below 1.
    """
    if x_HTC.dim() != 3 or keys_HEC.dim() != 3 or x_HTC.shape[0] != keys_HEC.shape[0]:
        raise ValueError(
            f"x_HTC and keys_HEC must be (H, T, C) and (H, E, C), got {tuple(x_HTC.shape)} and {tuple(keys_HEC.shape)}"
        )
    if x_HTC.shape[2] != keys_HEC.shape[2]:
        raise ValueError(f"x_HTC has width {x_HTC.shape[2]}, keys_HEC {keys_HEC.shape[2]}")
    if x_HTC.dtype != keys_HEC.dtype or x_HTC.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x_HTC and keys_HEC must both be float32 or float64, got {x_HTC.dtype}, {keys_HEC.dtype}")
    experts = keys_HEC.shape[1]
    check_count("top_k", top_k, 1, experts, f"the {experts} experts of a head")
    if bias_HE is not None and bias_HE.shape != keys_HEC.shape[:2]:
        raise ValueError(f"bias_HE must have shape {tuple(keys_HEC.shape[:2])}, got {tuple(bias_HE.shape)}")
    check_count("tile", tile)
    values, ids = _StreamingTopK.apply(x_HTC, keys_HEC, bias_HE, top_k, tile)  # type: ignore[no-untyped-call]
    return values, ids


class _StreamingTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_HTC: Tensor, keys_HEC: Tensor, bias_HE: Tensor | None, top_k: int, tile: int
    ) -> tuple[Tensor, Tensor]:
        heads, rows, _ = x_HTC.shape
        values_HTK = x_HTC.new_empty((heads, rows, top_k))
        ids_HTK = torch.empty((heads, rows, top_k), dtype=torch.int64, device=x_HTC.device)
        with _exact_products(x_HTC):
            for head in range(heads):
                bias_E = None if bias_HE is None else bias_HE[head].detach()
                for first in range(0, rows, TILE_ROWS):
                    part = slice(first, first + TILE_ROWS)
                    found = _select(x_HTC[head, part], keys_HEC[head], bias_E, top_k, tile)
                    values_HTK[head, part], ids_HTK[head, part] = found
        ctx.save_for_backward(x_HTC, keys_HEC, ids_HTK.to(torch.int32))
        ctx.mark_non_differentiable(ids_HTK)
        return values_HTK, ids_HTK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_HTK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x_HTC, keys_HEC, ids_HTK = ctx.saved_tensors
        heads, rows, width = x_HTC.shape
        experts = keys_HEC.shape[1]
        x, keys = x_HTC.reshape(-1, width), keys_HEC.reshape(-1, width)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dkeys = torch.zeros_like(keys) if ctx.needs_input_grad[1] else None
        first_H11 = torch.arange(heads, device=x.device)[:, None, None] * experts
        flat_NK = (ids_HTK.to(torch.int64) + first_H11).reshape(heads * rows, -1)
        for slot in range(flat_NK.shape[1]):  # a slot at a time: no rows by k by width
            expert_N, grad_N1 = flat_NK[:, slot], grad_HTK[..., slot].reshape(-1, 1)
            if dx is not None:
                dx += keys.index_select(0, expert_N).mul_(grad_N1)
            if dkeys is not None:
                dkeys.index_add_(0, expert_N, x * grad_N1)
        return (
            None if dx is None else dx.view_as(x_HTC),
            None if dkeys is None else dkeys.view_as(keys_HEC),
            None,
            None,
            None,
        )


def _select(x_TC: Tensor, keys_EC: Tensor, bias_E: Tensor | None, top_k: int, tile: int) -> tuple[Tensor, Tensor]:
    """Clean scores (T, k) and ids (T, k) of one head, best first."""
    best_TK = clean_TK = ids_TK = None
    for first in range(0, keys_EC.shape[0], tile):
        clean = x_TC @ keys_EC[first : first + tile].t()
        ids_M = torch.arange(first, first + clean.shape[1], device=x_TC.device)
        biased = clean if bias_E is None else clean + bias_E[first : first + tile].to(clean.dtype)
        if biased.dtype == torch.float32:
            joined = pack(biased, ids_M)
            joined = joined if best_TK is None else torch.cat([best_TK, joined], 1)
            best_TK, place_TK = joined.topk(min(top_k, joined.shape[1]), dim=1)
            ids_TK = unpack_ids(best_TK)
        else:
            # Those kept so far stand first and have lower ids: a stable sort keeps the lower one among equals.
            joined = biased if best_TK is None else torch.cat([best_TK, biased], 1)
            ids = ids_M.expand(clean.shape)
            ids = ids if ids_TK is None else torch.cat([ids_TK, ids], 1)
            best_TK, place_TK = joined.sort(dim=1, descending=True, stable=True)
            best_TK, place_TK = best_TK[:, :top_k], place_TK[:, :top_k]
            ids_TK = ids.gather(1, place_TK)
        clean_TK = (clean if clean_TK is None else torch.cat([clean_TK, clean], 1)).gather(1, place_TK)
    assert clean_TK is not None and ids_TK is not None
    return clean_TK, ids_TK


@contextmanager
def _exact_products(like: Tensor) -> Iterator[None]:
    """Products in true float32 inside: reduced precision moves scores by more than their distances."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
