"""Experts that work in a latent space which all of them share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.experts.activations import Activation
from moesaic.experts.base import Experts
from moesaic.experts.ffn import FFNExperts
from moesaic.formats.arguments import check_count
from moesaic.routing import Context, ParameterSpec, Routing


class LatentExperts(Experts):
    r"""Feed-forward experts between one shared down- and one shared up-projection (LatentMoE, arXiv:2601.18089).

    .. math:: y_t = W_\uparrow \sum_{e \in S_t} w_{t,e} \, f_e(W_\downarrow x_t), \qquad
              W_\downarrow \in \mathbb{R}^{\ell \times d}, \; W_\uparrow \in \mathbb{R}^{o \times \ell}

    with ordinary experts :math:`f_e` of hidden width F on rows of width :math:`\ell = d / \alpha`. Dispatch and combine
    move :math:`\ell`-wide rows and an expert has :math:`\alpha` times fewer weights; they pay for :math:`\alpha` times
    more experts. There is no bias, norm or activation between projections and experts. The router of the layer and its
    shared experts see x, not the latent row.

    Args:
        dim: d.
        width: F, hidden units of each expert; the same as without the latent space.
        num_experts: E.
        latent_size: :math:`\ell`, or
        compression: :math:`\alpha`; 4 where neither is given.
        activation: as in :class:`FFNExperts`.
        bias: whether the experts' own projections have biases.
        widths: as in :class:`FFNExperts`.
        out_dim: o, d by default.
        init_scale: every matrix starts normal with standard deviation ``init_scale / sqrt(fan_in)``.
        zero_down: start W_up at zero, so that the bank starts as the zero function.
        recompute: as in :class:`FFNExperts`.

    Shapes:
        x_TD, Routing with T rows -> (T, o).

    Raises:
        ValueError: sizes that are not positive, a latent wider than d, a compression that does not divide d, both of
            them given, an unknown activation.
    """

    parameter_axes: ClassVar[Mapping[str, ParameterSpec]] = {
        "down_ZD": ParameterSpec(("latent", "model"), "dense"),
        "up_OZ": ParameterSpec(("out", "latent"), "dense"),
    }

    def __init__(
        self,
        dim: int,
        width: int,
        num_experts: int,
        *,
        latent_size: int | None = None,
        compression: int | None = None,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        widths: Sequence[int] | None = None,
        out_dim: int | None = None,
        init_scale: float = 1.0,
        zero_down: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__(dim, num_experts, out_dim)
        self.latent_size = latent_width(dim, latent_size, compression)
        self.zero_down = zero_down
        self.down_ZD = nn.Parameter(torch.empty(self.latent_size, dim))
        self.bank = _LatentBank(
            self.latent_size,
            width,
            num_experts,
            activation=activation,
            bias=bias,
            widths=widths,
            init_scale=init_scale,
            recompute=recompute,
        )
        self.up_OZ = nn.Parameter(torch.empty(self.out_dim, self.latent_size))
        self.reset_parameters()

    @property
    def width(self) -> int:
        """F, hidden units of each expert."""
        return self.bank.width

    @property
    def shared_parameters(self) -> int:
        """Parameters that every row passes through, whatever its experts: the two projections."""
        return self.down_ZD.numel() + self.up_OZ.numel()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights; see ``init_scale`` and ``zero_down``."""
        self.bank.reset_parameters(generator)
        scale = self.bank.init_scale
        self.down_ZD.normal_(0, scale / math.sqrt(self.dim), generator=generator)
        self.up_OZ.normal_(0, scale / math.sqrt(self.latent_size), generator=generator)
        if self.zero_down:
            self.up_OZ.zero_()

    def forward(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Project down, dispatch, compute and combine in the latent space, project up once."""
        context = self.check_input(x_TD, routing, context)
        kind = type(self)
        if (
            kind.rows is LatentExperts.rows
            and kind.outputs is LatentExperts.outputs
            and kind.combine is Experts.combine
        ):
            return self.leave(self.bank(self.enter(blank_padding(x_TD, context)), routing, context))
        return self.combine(self.outputs(x_TD, routing, context), routing)

    def enter(self, x_TD: Tensor) -> Tensor:
        """z = W_down x: (T, d) -> (T, l)."""
        if not torch.is_autocast_enabled(x_TD.device.type):
            self.refuse_other_dtype(x_TD, self.down_ZD)
        return F.linear(x_TD, self.down_ZD)

    def leave(self, z_TZ: Tensor) -> Tensor:
        """W_up z: (..., l) -> (..., o)."""
        return F.linear(z_TZ, self.up_OZ)

    def rows(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        """(N, d) rows sorted by expert -> (N, o): each expert as a function of the full width, W_up f_e(W_down x)."""
        return self.leave(self.bank.rows(self.enter(x_ND), counts, context))

    def outputs(self, x_TD: Tensor, routing: Routing, context: Context) -> Tensor:
        """Unweighted expert outputs slot by slot, (T, K, o)."""
        return self.leave(self.bank.outputs(self.enter(blank_padding(x_TD, context)), routing, context))

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Weights of the experts ``ids`` in the latent space, as :meth:`FFNExperts.weights` gives them."""
        return self.bank.weights(ids)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim} -> {self.latent_size} -> {self.out_dim}"


class InnerBank(FFNExperts):
    """Experts between projections: their rows have the axis ``row_axis``, not ``model``."""

    row_axis: ClassVar[str]

    @property
    def parameter_axes(self) -> Mapping[str, ParameterSpec]:
        """Axes and role of each parameter."""
        rename = {"model": self.row_axis, "out": self.row_axis}
        return {
            name: ParameterSpec(tuple(rename.get(axis, axis) for axis in spec.axes), spec.role)
            for name, spec in super().parameter_axes.items()
        }


class _LatentBank(InnerBank):
    row_axis = "latent"


def blank_padding(x_TD: Tensor, context: Context) -> Tensor:
    """Rows with padding set to zero: a projection of every row would carry its NaN into a shared gradient."""
    mask_T = context.token_mask_T
    return x_TD if mask_T is None else x_TD.masked_fill(~mask_T[:, None], 0.0)


def latent_width(dim: int, latent_size: int | None, compression: int | None) -> int:
    """The latent width that a size or a compression names; d / 4 for neither.

    Raises:
        ValueError: both; a size outside [1, d]; a compression that is not positive or does not divide d.
    """
    if latent_size is not None and compression is not None:
        raise ValueError(f"give latent_size or compression, not both; got {latent_size} and {compression}")
    if latent_size is not None:
        return check_count("latent_size", latent_size, 1, dim, f"the model width {dim}")
    compression = 4 if compression is None else compression
    check_count("compression", compression)
    if dim % compression:
        raise ValueError(f"compression must be a positive divisor of the model width {dim}, got {compression}")
    return dim // compression
