"""Normalisation of the model width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.formats.arguments import check_count

KINDS = ("rms", "layer")


class Norm(nn.Module):
    r"""Root-mean-square norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450), without bias.

    .. math:: y = w \odot x / \sqrt{\overline{x^2} + \epsilon} \quad \text{(rms)}, \qquad
       y = w \odot (x - \bar x) / \sqrt{\mathrm{var}(x) + \epsilon} \quad \text{(layer)}

    Statistics are float32 whatever the input's dtype. On the CPU the layer norm is one fused operation and the
    root-mean-square norm is several.

    Args:
        dim: width of the last axis.
        kind: ``"rms"`` or ``"layer"``.
        eps: :math:`\epsilon`.
        scale: whether there is a learned factor w.

    Shapes:
        x (..., dim) -> (..., dim).

    Raises:
        ValueError: an unknown kind, a width below 1.
    """

    def __init__(self, dim: int, kind: str = "rms", eps: float = 1e-6, *, scale: bool = True) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"norm must be one of {KINDS}, got {kind!r}")
        dim = check_count("dim", dim)
        self.dim, self.kind, self.eps = dim, kind, eps
        self.weight = nn.Parameter(torch.ones(dim)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        dtype = x.dtype
        x = x.float() if dtype in (torch.bfloat16, torch.float16) else x
        weight = None if self.weight is None else self.weight.to(x.dtype)
        if self.kind == "layer":
            y = F.layer_norm(x, (self.dim,), weight, None, self.eps)
        else:
            y = F.rms_norm(x, (self.dim,), weight, self.eps)
        return y.to(dtype)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim}, {self.kind!r}, scale={self.weight is not None}"
