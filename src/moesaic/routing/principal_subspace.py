"""STAR: a second gate in the principal subspace of the router's own inputs, tracked online."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.formats.arguments import check_count
from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.routing import Routing
from moesaic.routing.selection import TopKSelection
from moesaic.routing.state import in_recompute
from moesaic.routing.subspace import GHASubspace

MIXES = ("learned", "identity", "frozen")
UPDATES = ("step", "forward", "never")


class PrincipalSubspaceRouter(TopKSelection):
    r"""Structure-aware router of STAR, arXiv:2606.08814.

    A linear gate, learned from the task alone, and a gate whose vectors live in the principal subspace of the inputs
    are mixed expert by expert,

    .. math:: \ell_{t,e} = a_e \, w_e^\top x_t + (1 - a_e) \, z_e^\top x_t, \qquad
              Z = R V, \qquad a = \sigma(\alpha),

    then the K best experts, weighted by the softmax over all of them. The rows of V follow the principal directions of
    the inputs (:class:`GHASubspace`) without any gradient; W, R and :math:`\alpha` are learned. R spreads the variance
    over the experts: with R = I expert e has the energy of the e-th direction, and the low ones die.

    Padded rows do not move the basis. In recomputation it stands still.

    Args:
        dim: model width D.
        num_experts: E, at most D.
        top_k: K, experts per row.
        basis_lr: step size of the basis. The paper's 5e-5 is for 60,000 steps; a few hundred need about 0.01.
        basis_iters: updates of the basis per step.
        update: when the basis moves in training: ``"step"`` (once per optimizer step, in ``end_step``, from all
            micro-batches), ``"forward"`` (before the logits of every forward, the authors' order; a layer that runs
            twice before one backward pass is then recomputed with the later basis), ``"never"`` (a frozen random
            basis).
        mix: R: ``"learned"`` from an orthogonal start, ``"frozen"`` there, or ``"identity"``.
        interpolate: learn :math:`\alpha`; without it both gates count half.
        basis_only: the logits are those of the basis alone; W and :math:`\alpha` are frozen.
        renormalize: see :class:`TopKSelection`; the paper does not.
        **selection: other keyword arguments of :class:`TopKSelection`.

    Shapes:
        x_TD -> Routing (T, K).

    Raises:
        ValueError: more experts than dimensions, a non-positive ``basis_lr`` or ``basis_iters``, unknown ``mix`` or
            ``update``; inputs that are not finite where the basis is to move; see also :class:`TopKSelection`.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {
        "weight_ED": ParameterSpec(("expert", "model"), "router"),
        "mix_EE": ParameterSpec(("expert", "in"), "router"),
        "alpha_E": ParameterSpec(("expert",), "scalar"),
    }

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        *,
        basis_lr: float = 5e-5,
        basis_iters: int = 1,
        update: str = "step",
        mix: str = "learned",
        interpolate: bool = True,
        basis_only: bool = False,
        renormalize: bool | None = False,
        **selection: Any,
    ) -> None:
        super().__init__(dim, num_experts, top_k, renormalize=renormalize, **selection)
        if num_experts > dim:
            raise ValueError(
                f"num_experts must be at most dim = {dim}, got {num_experts}: a basis has one row an expert"
            )
        if mix not in MIXES:
            raise ValueError(f"mix must be one of {MIXES}, got {mix!r}")
        if update not in UPDATES:
            raise ValueError(f"update must be one of {UPDATES}, got {update!r}")
        self.update = update
        self.mix = mix
        self.basis_only = basis_only
        iters = check_count("basis_iters", basis_iters)
        self.subspace = GHASubspace(dim, num_experts, lr=basis_lr, iters=iters)
        linear_is_used = not basis_only
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32), linear_is_used)
        self.alpha_E = nn.Parameter(torch.empty(num_experts, dtype=torch.float32), interpolate and linear_is_used)
        if mix != "identity":
            self.mix_EE = nn.Parameter(torch.empty(num_experts, num_experts, dtype=torch.float32), mix == "learned")
        self._adaptation: tuple[float | None, int | None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal W with standard deviation 1 / sqrt(D), random unit rows of V, orthogonal R, alpha 0."""
        super().reset_parameters()
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)
        nn.init.zeros_(self.alpha_E)
        if self.mix != "identity":
            nn.init.orthogonal_(self.mix_EE)
        self.subspace.reset_parameters()

    def forward(self, x_TD: Tensor, context: Context | None = None) -> Routing:
        """Route ``x_TD`` (T, D), and move or feed the basis where it is time to; see the class."""
        context = self.check_input(x_TD, context)
        adapting = self._adaptation is not None and not in_recompute()
        counting = self.counting() and not adapting
        if adapting or (counting and self.update == "forward"):
            lr, iters = self._adaptation or (None, None)
            with torch.autocast(x_TD.device.type, enabled=False):
                self.subspace.update(_real(x_TD, context), lr=lr, iters=iters, reduce=not adapting)
        routing = super().forward(x_TD, context)
        if counting and self.update == "step":
            with torch.autocast(x_TD.device.type, enabled=False):
                self.subspace.gather(_real(x_TD, context))
        return routing

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) with the basis as it is."""
        basis_logits_TE = F.linear(x_TD, self.expert_vectors().to(x_TD.dtype))
        if self.basis_only:
            return basis_logits_TE
        share_E = self.alpha_E.sigmoid().to(x_TD.dtype)
        return share_E * F.linear(x_TD, self.weight_ED.to(x_TD.dtype)) + (1 - share_E) * basis_logits_TE

    def expert_vectors(self) -> Tensor:
        """(E, D) Z = R V, with gradient to R only."""
        # A copy: the basis moves in place, perhaps before the backward pass has read it.
        basis_ED = self.subspace.basis_KD.detach().clone()
        return basis_ED if self.mix == "identity" else self.mix_EE @ basis_ED

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        return f"{super().extra_repr()}, update={self.update}, mix={self.mix}, basis_only={self.basis_only}"


def _real(x_TD: Tensor, context: Context) -> Tensor:
    """The rows that are not padding."""
    return x_TD if context.token_mask_T is None else x_TD[context.token_mask_T]


@contextmanager
def test_time_adaptation(
    model: nn.Module,
    lr: float | None = None,  # noqa: PT028  (no test)
    iters: int | None = None,  # noqa: PT028
    *,
    keep: bool = False,  # noqa: PT028
) -> Iterator[list[PrincipalSubspaceRouter]]:
    """Let the bases of all STAR routers follow unlabelled inputs inside the block, with everything else still.

    The model is put into eval mode and gradients are off. Each forward first moves the bases by its batch, then routes
    it. On leaving, modes and bases are what they were; each rank of a process group adapts by itself.

    Args:
        model: any module with :class:`PrincipalSubspaceRouter` in it.
        lr: step size of the bases; each router's own by default.
        iters: updates per forward; each router's own by default.
        keep: leave the adapted bases in place.

    Yields:
        The routers; ``router.subspace.reset()`` goes back to the trained basis inside the block.

    Raises:
        ValueError: a model without such routers; a non-positive ``lr`` or ``iters``.
    """
    routers = [module for module in model.modules() if isinstance(module, PrincipalSubspaceRouter)]
    if not routers:
        raise ValueError(f"{type(model).__name__} has no PrincipalSubspaceRouter, so there is nothing to adapt")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"lr must be finite and > 0, got {lr}")
    iters = None if iters is None else check_count("iters", iters)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for router in routers:
        router.subspace.mark()
        router._adaptation = (lr, iters)
    try:
        with torch.no_grad():
            yield routers
    finally:
        for router in routers:
            router._adaptation = None
            if not keep:
                router.subspace.reset()
        for module, training in modes:
            module.training = training


test_time_adaptation.__test__ = False  # type: ignore[attr-defined]  # no test, whatever its name says to pytest
