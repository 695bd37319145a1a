"""32-bit floats as integers of the same order, so that an integer can carry a score and an id."""

from __future__ import annotations

import torch
from torch import Tensor

_ID_BITS = 32
_ID_MASK = 2**_ID_BITS - 1
_SIGN_FLIP = 2**31 - 1


def float_to_key(value: Tensor) -> Tensor:
    """Signed 64-bit integers in [-2^31, 2^31) that order as the floats do.

    A float with sign 0 keeps its bits, one with sign 1 has its other 31 bits flipped: among negative floats a larger
    pattern is a smaller number. -0.0 comes directly below +0.0; NaN with sign 0 above infinity.

    Args:
        value: float32 of any shape.

    Raises:
        ValueError: another dtype.
    """
    if value.dtype != torch.float32:
        raise ValueError(f"value must be float32, got {value.dtype}")
    bits = value.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ _SIGN_FLIP, bits).to(torch.int64)


def key_to_float(key: Tensor) -> Tensor:
    """The float32 whose key this is, bit for bit."""
    bits = key.to(torch.int32)
    return torch.where(bits < 0, bits ^ _SIGN_FLIP, bits).view(torch.float32)


def pack(value: Tensor, ids: Tensor) -> Tensor:
    """One int64 a pair, larger for a larger float32, and among equal floats for the lower id.

    Args:
        value: float32; -0.0 counts as +0.0.
        ids: int64 in [0, 2^31), of a shape that broadcasts to that of ``value``.
    """
    packed: Tensor = (float_to_key(value + 0.0) << _ID_BITS) | (_ID_MASK - ids)
    return packed


def unpack_ids(packed: Tensor) -> Tensor:
    """The ids of :func:`pack`."""
    ids: Tensor = _ID_MASK - (packed & _ID_MASK)
    return ids
