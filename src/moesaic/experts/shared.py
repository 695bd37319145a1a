"""Shared experts: what every row goes through beside its routed experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.experts.activations import Activation, activation_of
from moesaic.formats.arguments import check_count


class SharedExpert(nn.Module):
    r"""A feed-forward net for every row (DeepSeekMoE, arXiv:2401.06066), optionally gated (Qwen2, arXiv:2407.10671).

    .. math:: s(x) = \sigma(v^\top x) \, (D \, \mathrm{act}(U x, G x)), \quad \text{without the factor where not gated}

    Several shared experts of width F are one of their summed width.

    Args:
        dim: D.
        width: F.
        activation: ``"swiglu"``, ``"gelu"``, ``"relu2"`` or ``"gpt_oss"``.
        gated: multiply by a sigmoid of a linear function of the row.
        bias: whether the projections have biases.
        out_dim: O, D by default.
        zero_down: start the down projection at zero.

    Shapes:
        x_TD (T, D) -> (T, O).

    Raises:
        ValueError: sizes that are not positive, an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        activation: str | Activation = "swiglu",
        *,
        gated: bool = False,
        bias: bool = False,
        out_dim: int | None = None,
        zero_down: bool = False,
    ) -> None:
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        for name, value in (("dim", dim), ("width", width), ("out_dim", out_dim)):
            check_count(name, value)
        self.dim, self.width, self.out_dim = dim, width, out_dim
        self.activation = activation_of(activation)
        self.up = nn.Linear(dim, width, bias=bias)
        self.gate = nn.Linear(dim, width, bias=bias) if self.activation.gated else None
        self.down = nn.Linear(width, out_dim, bias=bias)
        self.output_gate = nn.Linear(dim, 1, bias=False) if gated else None
        if zero_down:
            nn.init.zeros_(self.down.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, O)."""
        if x_TD.shape[-1] != self.dim:
            raise ValueError(f"SharedExpert: x_TD must have shape (T, {self.dim}), got {tuple(x_TD.shape)}")
        y_TO: Tensor = self.down(self.activation(self.up(x_TD), None if self.gate is None else self.gate(x_TD)))
        return y_TO if self.output_gate is None else torch.sigmoid(self.output_gate(x_TD)) * y_TO
