"""A short causal depth-wise convolution: each channel sees its own last values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.routing import ParameterSpec


class CausalShift(nn.Module):
    r"""Adds to each row a learned mixture of the rows before it, channel by channel (Primer, arXiv:2109.08668).

    .. math:: y_t = x_t + \sum_{j=1}^{J} w_j \odot x_{t-j}

    Starts as the identity.

    Args:
        dim: D.
        places: J, rows looked back.

    Shapes:
        x_BSD, past_BPD -> (B, S, D).

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(self, dim: int, places: int) -> None:
        super().__init__()
        dim, places = check_count("dim", dim), check_count("places", places)
        self.places = places
        self.weight_JD = nn.Parameter(torch.zeros(places, dim))

    @property
    def parameter_axes(self) -> Mapping[str, ParameterSpec]:
        """Per-channel factors, which neither decay nor are orthogonalised."""
        return {"weight_JD": ParameterSpec(("place", "model"), "scalar")}

    def forward(self, x_BSD: Tensor, past_BPD: Tensor | None = None) -> Tensor:
        """Mix.

        Args:
            x_BSD: rows of this call; zero where padded.
            past_BPD: rows before them (the last J count); None at the start.
        """
        length = x_BSD.shape[1]
        if past_BPD is not None:
            past_BPD = past_BPD[:, max(past_BPD.shape[1] - self.places, 0) :]
            full = torch.cat([past_BPD.to(x_BSD.dtype), x_BSD], dim=1)
        else:
            full = x_BSD
        full = F.pad(full, (0, 0, self.places + length - full.shape[1], 0))
        y = x_BSD
        for back in range(1, self.places + 1):
            start = self.places - back
            y = torch.addcmul(y, full[:, start : start + length], self.weight_JD[back - 1].to(x_BSD.dtype))
        return y
