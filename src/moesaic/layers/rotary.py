"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_angles(position_BS: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    r"""Cosine and sine of :math:`p \, \theta^{-2i/d}` (RoFormer, arXiv:2104.09864).

    Args:
        position_BS: (B, S) positions.
        head_dim: d, even.
        base: :math:`\theta`.

    Returns:
        Two (B, 1, S, d / 2) float32 tensors.
    """
    power = torch.arange(0, head_dim, 2, device=position_BS.device, dtype=torch.float32) / head_dim
    angle = position_BS[:, None, :, None].float() * base**-power
    return angle.cos(), angle.sin()


def rotate(x_BHSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d / 2) of each head, as the checkpoints of transformers have them.

    Args:
        x_BHSC: (B, H, S, d).
        cos: (B, 1, S, d / 2).
        sin: (B, 1, S, d / 2).
    """
    rotated: Tensor = _Rotate.apply(x_BHSC, cos.to(x_BHSC.dtype), sin.to(x_BHSC.dtype))  # type: ignore[no-untyped-call]
    return rotated


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(low, cos, out=out[..., :half]).addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out[..., half:]).addcmul_(low, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of the size of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, -1), None, None
