"""Muon: orthogonalised momentum for matrices and stacked experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.formats.arguments import check_count

# Coefficients (a, b, c) of the odd polynomials x -> a x + b x^3 + c x^5 that best push singular values in [1e-3, 1]
# to 1 when applied in this order; Polar Express, arXiv:2505.16932. The last one is the fixed point and may be repeated.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749518, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


class Muon(torch.optim.Optimizer):
    r"""Momentum whose direction is the nearest orthogonal matrix (Muon; Jordan et al. 2024, arXiv:2502.16982).

    With gradient :math:`G`, momentum :math:`\mu`, the buffer :math:`M \leftarrow \mu M + (1 - \mu) G` and its Nesterov
    look-ahead :math:`U = (1 - \mu) G + \mu M`,

    .. math:: W \leftarrow (1 - \eta \lambda) W - \eta \sqrt{\max(1, \text{out} / \text{in})} \; \mathrm{polar}(U).

    Parameters of one shape are orthogonalised as one batch; leading axes of a parameter (experts) are a batch too.
    Group
    options: ``stack`` (None, 1 or 2) joins the experts of an (E, A, B) parameter along that axis and orthogonalises
    the whole as one matrix, scaled so that an expert's step keeps its mean size: E times fewer products of the small
    side; ``transposed`` says that a matrix is stored (in, out).

    Args:
        params: parameters of at least two axes, or groups of them.
        lr: :math:`\eta`.
        momentum: :math:`\mu` in [0, 1).
        momentum_warmup: steps over which :math:`\mu` rises linearly from 0.85 (or stays, if lower).
        weight_decay: :math:`\lambda`, decoupled.
        iterations: polynomial steps, 1 to 8; 5 reach singular values within about 0.1 of 1.
        every: orthogonalise at every n-th step, reuse the last direction between.

    Raises:
        ValueError: a parameter with fewer than two axes, ``stack`` for one without an expert axis, options out of
            range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        momentum_warmup: int = 0,
        weight_decay: float = 0.0,
        iterations: int = 5,
        every: int = 1,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        check_count("iterations", iterations, 1, len(_POLAR_EXPRESS))
        check_count("every", every)
        check_count("momentum_warmup", momentum_warmup, 0)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "momentum_warmup": momentum_warmup,
            "weight_decay": weight_decay,
            "iterations": iterations,
            "every": every,
            "stack": None,
            "transposed": False,
            "step": 0,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() < 2:
                    raise ValueError(f"Muon moves matrices, got a parameter of shape {tuple(parameter.shape)}")
                if group["stack"] is not None and (parameter.dim() != 3 or group["stack"] not in (1, 2)):
                    raise ValueError(
                        f"stack={group['stack']} needs a parameter (E, A, B) and the axis 1 or 2,"
                        f" got {tuple(parameter.shape)}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._step_batch(group, parameters)
            group["step"] += 1
        return loss

    def _step_batch(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Move parameters of one shape."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        momentum = warmed_momentum(group["momentum"], group["momentum_warmup"], group["step"])
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
        fresh = group["step"] % group["every"] == 0 or "direction" not in self.state[parameters[0]]
        if fresh:
            ahead = torch._foreach_lerp(grads, momenta, momentum)
            directions = list(_directions(torch.stack(ahead), group).unbind(0))
            if group["every"] > 1:
                for parameter, direction in zip(parameters, directions):
                    self.state[parameter]["direction"] = direction.clone()
        else:
            directions = [self.state[parameter]["direction"] for parameter in parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(list[Tensor](parameters), 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(list[Tensor](parameters), directions, alpha=-group["lr"])


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    r"""Nearest orthogonal matrix :math:`U V^\top` of each :math:`U \Sigma V^\top`, approximately.

    Polynomial iterations (Polar Express) carried out on the Gram matrix :math:`S = X X^\top` of the smaller side: each
    factor :math:`Q_i = a + b S + c S^2` commutes with :math:`S`, so :math:`S \leftarrow Q_i S Q_i` and the product of
    the factors meets the wide matrix only once, at the end.

    Args:
        matrices: (..., rows, columns), floating point.
        iterations: 1 to 8.

    Returns:
        The same shape; zero matrices stay zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * 1.02 + 1e-7)
    gram = x @ x.mT
    total: Tensor | None = None
    for index, (a, b, c) in enumerate(_POLAR_EXPRESS[:iterations]):
        factor = b * gram + c * (gram @ gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        total = factor if total is None else factor @ total
        if index < iterations - 1:
            gram = factor @ gram @ factor
    assert total is not None
    result: Tensor = total @ x
    return result.mT if tall else result


def warmed_momentum(momentum: float, warmup: int, step: int) -> float:
    """Momentum at ``step``, rising linearly from 0.85 over ``warmup`` steps."""
    if step >= warmup or momentum <= 0.85:
        return momentum
    return 0.85 + (momentum - 0.85) * step / warmup


def _directions(ahead: Tensor, group: dict[str, Any]) -> Tensor:
    """Orthogonal directions of a batch (P, ..., rows, columns) of P parameters, scaled for their shape."""
    rows, columns = ahead.shape[-2:]
    out, into = (columns, rows) if group["transposed"] else (rows, columns)
    scale = max(1.0, out / into) ** 0.5
    if group["stack"] is None:
        return orthogonalize(ahead, group["iterations"]).mul_(scale)
    experts, side = ahead.shape[1], group["stack"]
    joined = ahead.flatten(1, 2) if side == 1 else ahead.transpose(1, 2).flatten(2, 3)
    whole = orthogonalize(joined, group["iterations"])
    scale *= (experts * min(rows, columns) / min(*joined.shape[-2:])) ** 0.5
    if side == 1:
        return whole.view(ahead.shape).mul(scale)
    return whole.view(-1, rows, experts, columns).transpose(1, 2).mul(scale)
