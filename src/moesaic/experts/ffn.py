"""Banks of feed-forward experts, the ordinary case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.experts.activations import Activation, activation_of
from moesaic.experts.backends import chosen_backend
from moesaic.experts.base import Experts
from moesaic.experts.fused import Parameters, fused_ffn
from moesaic.formats.arguments import check_count
from moesaic.routing import Context, ParameterSpec, Routing


class FFNExperts(Experts):
    r"""E feed-forward experts with stacked weights.

    .. math:: f_e(x) = D_e \, \mathrm{act}(U_e x + b^u_e, \; G_e x + b^g_e) + b^d_e

    with a gate :math:`G_e` where the activation is gated. Experts may have different widths inside one bank: storage is
    padded to the widest, and the padding stays zero, is never used and never gets a gradient.

    Args:
        dim: D.
        width: F, hidden units of each expert (of the widest, when ``widths`` is given).
        num_experts: E.
        activation: ``"swiglu"``, ``"gelu"``, ``"relu2"`` or ``"gpt_oss"``.
        bias: whether the projections have biases.
        widths: E numbers in [1, width], hidden units of each expert; None for ``width`` everywhere.
        out_dim: O, D by default.
        init_scale: weights start normal with standard deviation ``init_scale / sqrt(fan_in)``, biases at zero.
        zero_down: start the down projection at zero, so that the bank starts as the zero function.
        recompute: keep no activations for the backward and compute them again (less memory, about a fifth more work).

    Shapes:
        x_TD, Routing with T rows -> (T, O).

    Raises:
        ValueError: sizes that are not positive, widths of another length or out of range, an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        num_experts: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        widths: Sequence[int] | None = None,
        out_dim: int | None = None,
        init_scale: float = 1.0,
        zero_down: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__(dim, num_experts, out_dim)
        width = check_count("width", width)
        if not math.isfinite(init_scale) or init_scale < 0:
            raise ValueError(f"init_scale must be finite and >= 0, got {init_scale}")
        if widths is not None:
            widths = tuple(check_count("widths", value, 1, width, f"width = {width}") for value in widths)
            if len(widths) != num_experts:
                raise ValueError(f"widths must have one entry per expert ({num_experts}), got {len(widths)}: {widths}")
        self.width = width
        self.widths = widths
        self.activation = activation_of(activation)
        self.init_scale = init_scale
        self.zero_down = zero_down
        self.recompute = recompute
        self.gate_EFD = nn.Parameter(torch.empty(num_experts, width, dim)) if self.activation.gated else None
        self.up_EFD = nn.Parameter(torch.empty(num_experts, width, dim))
        self.down_EDF = nn.Parameter(torch.empty(num_experts, self.out_dim, width))
        gate_bias = bias and self.activation.gated
        self.gate_bias_EF = nn.Parameter(torch.empty(num_experts, width)) if gate_bias else None
        self.up_bias_EF = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias_ED = nn.Parameter(torch.empty(num_experts, self.out_dim)) if bias else None
        self.reset_parameters()

    @property
    def parameter_axes(self) -> Mapping[str, ParameterSpec]:
        """Axes and role of each parameter."""
        return {
            "gate_EFD": ParameterSpec(("expert", "width", "model"), "expert-in"),
            "up_EFD": ParameterSpec(("expert", "width", "model"), "expert-in"),
            "down_EDF": ParameterSpec(("expert", "out", "width"), "expert-out"),
            "gate_bias_EF": ParameterSpec(("expert", "width"), "expert-bias"),
            "up_bias_EF": ParameterSpec(("expert", "width"), "expert-bias"),
            "down_bias_ED": ParameterSpec(("expert", "out"), "expert-bias"),
        }

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights; see ``init_scale`` and ``zero_down``. Padding of narrower experts is set to zero."""
        for weight in (self.gate_EFD, self.up_EFD):
            if weight is not None:
                weight.normal_(0, self.init_scale / math.sqrt(self.dim), generator=generator)
        for expert in range(self.num_experts):
            fan_in = self.width if self.widths is None else self.widths[expert]
            std = 0.0 if self.zero_down else self.init_scale / math.sqrt(fan_in)
            self.down_EDF[expert].normal_(0, std, generator=generator) if std else self.down_EDF[expert].zero_()
        for bias in (self.gate_bias_EF, self.up_bias_EF, self.down_bias_ED):
            if bias is not None:
                bias.zero_()
        if self.widths is not None:
            for expert, width in enumerate(self.widths):
                self.down_EDF[expert, :, width:] = 0
                for weight in (self.gate_EFD, self.up_EFD):
                    if weight is not None:
                        weight[expert, width:] = 0

    def forward(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Dispatch, compute and combine, by the backend that fits (see :mod:`moesaic.experts.backends`)."""
        context = self.check_input(x_TD, routing, context)
        parameters, x_TD = self._compute_dtype(x_TD)
        if self._steps_replaced() or chosen_backend(x_TD, routing) == "reference":
            return self.combine(self.outputs(x_TD, routing, context), routing)
        return fused_ffn(x_TD, routing.weights_TK, routing.dispatch, parameters, self.activation, self.recompute)

    def rows(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        """(N, D) rows sorted by expert -> (N, O), by plain differentiable operations."""
        return self._rows(x_ND, counts, hidden_only=False)

    def hidden(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        """(N, D) rows sorted by expert -> (N, F) before the down projection; zero beyond an expert's width."""
        return self._rows(x_ND, counts, hidden_only=True)

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """``gate``, ``up`` (n, F, D), ``down`` (n, O, F) of experts ``ids``, and their biases (``gate_bias`` ...)."""
        found = {
            "gate": self.gate_EFD,
            "up": self.up_EFD,
            "down": self.down_EDF,
            "gate_bias": self.gate_bias_EF,
            "up_bias": self.up_bias_EF,
            "down_bias": self.down_bias_ED,
        }
        if ids is None:
            return {name: value for name, value in found.items() if value is not None}
        for expert in ids:
            if not 0 <= expert < self.num_experts:
                raise ValueError(f"ids holds {expert}; allowed are 0..{self.num_experts - 1}")
        index = torch.tensor(list(ids), dtype=torch.int64, device=self.up_EFD.device)
        return {name: value.index_select(0, index) for name, value in found.items() if value is not None}

    def _rows(self, x_ND: Tensor, counts: Sequence[int], hidden_only: bool) -> Tensor:
        bank, x_ND = self._compute_dtype(x_ND)
        gate_EFD, linear = bank.gate_EFD, nn.functional.linear
        done = []
        # Experts without rows take part with none: their gradient is zero, not missing.
        for expert, x in enumerate(x_ND.split_with_sizes(list(counts))):
            width = bank.width(expert)

            def cut(p: Tensor | None, expert: int = expert, width: int = width) -> Tensor | None:
                return None if p is None else p[expert, :width]

            up = linear(x, bank.up_EFD[expert, :width], cut(bank.up_bias_EF))
            gate = None if gate_EFD is None else linear(x, gate_EFD[expert, :width], cut(bank.gate_bias_EF))
            h = self.activation(up, gate)
            if hidden_only:
                done.append(nn.functional.pad(h, (0, self.width - width)))
            else:
                down_bias = None if bank.down_bias_EO is None else bank.down_bias_EO[expert]
                done.append(linear(h, bank.down_EOF[expert, :, :width], down_bias))
        return torch.cat(done)

    def _compute_dtype(self, x: Tensor) -> tuple[Parameters, Tensor]:
        """Parameters and input in the dtype to compute in: autocast's inside autocast, else the one they share."""
        parameters = Parameters(
            self.up_EFD,
            self.down_EDF,
            self.gate_EFD,
            self.up_bias_EF,
            self.gate_bias_EF,
            self.down_bias_ED,
            self.widths,
        )
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            return parameters.to(dtype), x.to(dtype)
        self.refuse_other_dtype(x, self.up_EFD)
        return parameters, x

    def _steps_replaced(self) -> bool:
        """Whether a subclass replaced a step that the fused path would skip."""
        kind = type(self)
        return (
            kind.rows is not FFNExperts.rows
            or kind.outputs is not Experts.outputs
            or kind.combine is not Experts.combine
            or kind._rows is not FFNExperts._rows
        )

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        widths = "" if self.widths is None else f", widths={self.widths}"
        sizes = f"{self.dim}, {self.width}, {self.num_experts}, out_dim={self.out_dim}"
        return f"{sizes}, activation={self.activation.name!r}{widths}"
