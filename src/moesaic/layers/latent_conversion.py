"""A trained MoE layer turned into a latent one: an extra of this library, not part of the paper."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from moesaic.experts import FFNExperts
from moesaic.experts.latent import LatentExperts, latent_width
from moesaic.layers.moe import MoE


@dataclasses.dataclass(frozen=True, eq=False)
class LatentConversion:
    """What :func:`compress_moe` made.

    Attributes:
        layer: the latent layer.
        kept_input: share of the squared norm of all first matrices that their common latent space keeps, in [0, 1].
        kept_output: the same of all last matrices.
    """

    layer: MoE
    kept_input: float
    kept_output: float


@torch.no_grad()
def compress_moe(moe: MoE, latent_size: int | None = None, *, compression: int | None = None) -> LatentConversion:
    r"""Start a latent layer from a trained one by truncated singular value decompositions (ours, not the paper's).

    All experts' first matrices stacked over experts and hidden units, :math:`A \in \mathbb{R}^{EcF \times d}`, have the
    best common rank-:math:`\ell` input space in their first right singular vectors V, all last matrices side by side,
    :math:`B \in \mathbb{R}^{d \times EF}` (biases as one more column an expert), the best output space in their first
    left ones U:

    .. math:: W_\downarrow = V^\top, \quad A' = A V, \qquad W_\uparrow = U, \quad B' = U^\top B.

    Where the experts read and write no more than :math:`\ell` directions the new layer computes the same; else it is a
    start for training. Router, shared expert and losses are copied; the number of experts stays.

    Args:
        moe: a layer with :class:`FFNExperts`.
        latent_size: :math:`\ell`, or
        compression: :math:`\alpha`; 4 where neither is given.

    Raises:
        ValueError: another bank, a latent size that does not fit.
    """
    bank = moe.experts
    if type(bank) is not FFNExperts:
        raise ValueError(f"moe must hold FFNExperts to be compressed, got {type(bank).__name__}")
    latent = latent_width(bank.dim, latent_size, compression)
    if latent > bank.out_dim:
        raise ValueError(f"latent_size must be at most the output width {bank.out_dim}, got {latent}")
    weights = bank.weights()
    firsts = [weights[name].flatten(0, 1).double() for name in ("gate", "up") if name in weights]
    lasts = [weights["down"].transpose(1, 2).flatten(0, 1).double()]
    if "down_bias" in weights:
        lasts.append(weights["down_bias"].double())
    v_DZ, kept_input = _common_space(torch.cat(firsts), latent)
    u_OZ, kept_output = _common_space(torch.cat(lasts), latent)

    experts = LatentExperts(
        bank.dim,
        bank.width,
        bank.num_experts,
        latent_size=latent,
        activation=bank.activation,
        bias="up_bias" in weights,
        out_dim=bank.out_dim,
        recompute=bank.recompute,
        widths=bank.widths,
    ).to(bank.up_EFD)
    experts.down_ZD.copy_(v_DZ.t())
    experts.up_OZ.copy_(u_OZ)
    for name, value in experts.weights().items():
        old = weights[name].double()
        new = old @ v_DZ if name in ("gate", "up") else u_OZ.t() @ old if name == "down" else old
        value.copy_(new @ u_OZ if name == "down_bias" else new)
    router, shared = copy.deepcopy(moe.router), copy.deepcopy(moe.shared)
    layer = MoE(experts, router, shared, [copy.deepcopy(loss) for loss in moe.losses])  # type: ignore[misc]
    return LatentConversion(layer.train(moe.training), kept_input, kept_output)


def _common_space(rows_ND: Tensor, size: int) -> tuple[Tensor, float]:
    """Orthonormal (D, size) directions that keep most of the rows' squared norm, and the share that they keep."""
    values_D, vectors_DD = torch.linalg.eigh(rows_ND.t() @ rows_ND)  # ascending
    total = float(values_D.clamp(min=0).sum())
    kept = float(values_D[-size:].clamp(min=0).sum()) / total if total > 0 else 1.0
    return vectors_DD[:, -size:].flip(1), kept
