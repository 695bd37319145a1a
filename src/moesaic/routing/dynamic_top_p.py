"""Top-p routing: a fixed threshold, and DTop-p's, which a controller moves."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.router import Router
from moesaic.routing.routing import Routing
from moesaic.routing.threshold_controller import PIThresholdController

SCOPES = ("model", "layer")
# Name under which shared controllers hang on the model.
SHARED = "threshold_controllers"


class TopPRouter(Router):
    r"""Top-p routing with a fixed threshold, arXiv:2403.07652: the fewest experts that reach a probability mass.

    .. math:: S_t = \min \Big\{ S : \sum_{e \in S} P_{t,e} \ge p \Big\}, \qquad
              w_{t,e} = P_{t,e} / \sum_{j \in S_t} P_{t,j},

    best first, ties to the lower index; at least one expert, all of them for p = 1. With ``normalize`` the logits of
    each row are standardised and scaled by a learned factor before the softmax (:func:`normalize_router_logits`).

    Args:
        dim: model width D.
        num_experts: E.
        p: the threshold, in (0, 1].
        normalize: standardise logits, with one learned scale (kept positive as :math:`e^\theta`, 1 at the start).

    Shapes:
        x_TD -> Routing with K = most experts used by one row.

    Raises:
        ValueError: p outside (0, 1].
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {
        "weight_ED": ParameterSpec(("expert", "model"), "router"),
        "scale_log": ParameterSpec((), "scalar"),
    }

    def __init__(self, dim: int, num_experts: int, p: float, *, normalize: bool = False) -> None:
        super().__init__(dim, num_experts)
        check_threshold(p)
        self.p = p
        self.normalize = normalize
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32))
        if normalize:
            self.scale_log = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(D), scale 1."""
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)
        if self.normalize:
            nn.init.zeros_(self.scale_log)

    def threshold(self) -> float | Tensor:
        """The threshold in force: a number, or a scalar on the router's device."""
        return self.p

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E), standardised and scaled where ``normalize`` is on."""
        logits_TE = F.linear(x_TD, self.weight_ED.to(x_TD.dtype))
        if self.normalize:
            logits_TE = normalize_router_logits(logits_TE, self.scale_log.exp().to(x_TD.dtype))
        return logits_TE

    def restrict(self, logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
        """See :meth:`Router.restrict`; standardised logits are standardised over the allowed experts alone."""
        masked_TE = super().restrict(logits_TE, allowed_TE)
        if not self.normalize:
            return masked_TE
        kept_TE = masked_TE != -torch.inf
        count_T1 = kept_TE.sum(-1, keepdim=True)
        finite_TE = masked_TE.masked_fill(~kept_TE, 0.0)
        centred_TE = (finite_TE - finite_TE.sum(-1, keepdim=True) / count_T1).masked_fill(~kept_TE, 0.0)
        variance_T1 = centred_TE.square().sum(-1, keepdim=True) / count_T1
        # Without the epsilon of the formula: these have unit size already, and twice must be once.
        std_T1 = variance_T1.clamp(min=torch.finfo(variance_T1.dtype).tiny).sqrt()
        again_TE = self.scale_log.exp().to(centred_TE.dtype) * centred_TE / std_T1
        changed_T1 = (~kept_TE).any(1, keepdim=True)
        return torch.where(changed_T1, again_TE.masked_fill(~kept_TE, -torch.inf), masked_TE)

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """The fewest best experts whose mass among the allowed ones reaches the threshold."""
        logits_TE = logits_TE.detach()
        if allowed_TE is not None:
            logits_TE = self.restrict(logits_TE, allowed_TE)
        ids_TE, kept_TE = top_p_prefix(logits_TE.softmax(-1), self.threshold())
        if allowed_TE is not None:
            kept_TE = kept_TE & allowed_TE.gather(1, ids_TE)
        if context.token_mask_T is not None:
            kept_TE = kept_TE & context.token_mask_T[:, None]
        slots = int(kept_TE.sum(1).max()) if len(kept_TE) else 0
        return ids_TE.masked_fill(~kept_TE, self.num_experts)[:, :slots]

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """Probabilities of the chosen experts divided by their sum: the softmax over them."""
        empty_TK = ids_TK == self.num_experts
        picked_TK = logits_TE.gather(1, ids_TK.clamp(max=self.num_experts - 1)).masked_fill(empty_TK, -torch.inf)
        # A row without experts would be 0 / 0; its logits are replaced so that neither value nor gradient is NaN.
        picked_TK = torch.where(empty_TK.all(1, keepdim=True), 0.0, picked_TK)
        return picked_TK.softmax(-1).masked_fill(empty_TK, 0.0)

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        return f"{self.dim} -> {self.num_experts}, p={float(self.threshold()):.4g}, normalize={self.normalize}"


class DynamicTopPRouter(TopPRouter):
    r"""Dynamic top-p routing with a sparsity controller (DTop-p), arXiv:2512.13996.

    Each row takes the fewest experts whose probabilities reach the threshold p (:class:`TopPRouter`), and a
    proportional-integral controller (:class:`PIThresholdController`) moves p once per optimizer step so that the mean
    number of experts per row stays at ``target``. Standardised logits with a learned scale let layers take different
    shares of one budget.

    The controller of a whole model belongs to the model: :func:`share_controllers` makes one for all its layers with
    ``scope="model"``. Until then, and with ``scope="layer"``, each layer holds the target by itself. Shared experts and
    padded rows are not counted. In evaluation p is what it was last.

    Args:
        dim: model width D.
        num_experts: E.
        target: T, mean experts per row that the controller holds, in [1, E].
        normalize: standardise logits, with one learned scale per layer.
        scope: ``"model"`` or ``"layer"``.
        kp, ki, p0, p_min, p_max, ema: see :class:`PIThresholdController`.

    Shapes:
        x_TD -> Routing with K = most experts used by one row.

    Raises:
        ValueError: an unknown scope; see also :class:`PIThresholdController`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        target: float,
        *,
        normalize: bool = True,
        scope: str = "model",
        kp: float = 0.1,
        ki: float = 0.1,
        p0: float | None = None,
        p_min: float = 1e-3,
        p_max: float = 1.0,
        ema: float = 0.0,
    ) -> None:
        super().__init__(dim, num_experts, 1.0, normalize=normalize)
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
        self.target = target
        self.scope = scope
        self.own_controller: PIThresholdController | None = PIThresholdController(
            target, num_experts, kp=kp, ki=ki, p0=p0, p_min=p_min, p_max=p_max, ema=ema
        )
        # In a tuple, so that a controller of the model does not become a part of each layer.
        self._shared: tuple[PIThresholdController, ...] = ()

    @property
    def controller(self) -> PIThresholdController:
        """The controller that serves this layer."""
        if self.own_controller is not None:
            return self.own_controller
        return self._shared[0]

    def share(self, controller: PIThresholdController) -> None:
        """Serve this layer by ``controller`` instead of one of its own.

        Raises:
            ValueError: a controller for another number of experts.
        """
        if controller.num_experts != self.num_experts:
            raise ValueError(f"controller is for {controller.num_experts} experts, this router has {self.num_experts}")
        self.own_controller = None
        self._shared = (controller,)
        self.target = controller.target

    def reset_parameters(self) -> None:
        """Weights, scale and the layer's own controller as at the start."""
        super().reset_parameters()
        if getattr(self, "own_controller", None) is not None:
            self.controller.reset_parameters()

    def threshold(self) -> float | Tensor:
        """p as a scalar tensor: reading it does not wait for the device."""
        return self.controller.threshold

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E); the first ones in training set the threshold's start."""
        logits_TE = super().score(x_TD, context)
        if self.counting() and not self.controller.calibrated:
            probs_TE = logits_TE.detach().softmax(-1)
            self.controller.calibrate(probs_TE if context.token_mask_T is None else probs_TE[context.token_mask_T])
        return logits_TE

    def observe(self, routing: Routing) -> None:
        """Count experts used and rows for the controller."""
        self.controller.observe(routing)


def share_controllers(model: nn.Module) -> list[PIThresholdController]:
    """Give the :class:`DynamicTopPRouter` layers of ``model`` with ``scope="model"`` one controller per equal setting.

    The controllers hang on ``model.threshold_controllers``: they are saved with it, once, and ``end_step(model)`` moves
    them, once. Calling it again changes nothing.

    Args:
        model: a module whose routers are in place.

    Returns:
        The controllers; empty when there are no such routers.

    Raises:
        ValueError: a bare container (``Sequential``, ``ModuleList`` ...), which would take them for its elements.
    """
    if isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"model is a {type(model).__name__}, which would take a controller for one of its elements: give the module"
            " that holds it"
        )
    shared: dict[str, PIThresholdController] = {
        controller.extra_repr(): controller for controller in getattr(model, SHARED, ())
    }
    for router in model.modules():
        if isinstance(router, DynamicTopPRouter) and router.scope == "model" and router.own_controller is not None:
            router.share(shared.setdefault(router.own_controller.extra_repr(), router.own_controller))
    if shared:
        setattr(model, SHARED, nn.ModuleList(shared.values()))
    return list(shared.values())


def normalize_router_logits(logits_TE: Tensor, scale: Tensor | float, eps: float = 1e-6) -> Tensor:
    r"""Logits of each row standardised over its experts and scaled.

    .. math:: \tilde h = \theta \, (h - \mathrm{mean}_e h) / (\mathrm{std}_e h + \epsilon),

    with the population standard deviation. The softmax of the result does not change with :math:`h \to c h + b`, c > 0.

    Args:
        logits_TE: (T, E).
        scale: :math:`\theta`.
        eps: see the formula; equal logits give zeros, with a finite gradient.
    """
    centred_TE = logits_TE - logits_TE.mean(-1, keepdim=True)
    variance_T1 = centred_TE.square().mean(-1, keepdim=True)
    # The root has no finite slope at 0, which equal logits reach.
    std_T1 = variance_T1.clamp(min=torch.finfo(variance_T1.dtype).tiny).sqrt()
    return scale * centred_TE / (std_T1 + eps)


def top_p_prefix(probs_TE: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    """Experts of each row from the best down, and which of them belong to the shortest prefix with mass at least p.

    Args:
        probs_TE: (T, E) probabilities.
        p: the threshold.

    Returns:
        ids (T, E) int64, kept (T, E) bool; the best expert is always kept, all for p >= 1.
    """
    sorted_TE, ids_TE = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    before_TE = sorted_TE.cumsum(-1) - sorted_TE
    p = torch.as_tensor(p, dtype=torch.float64, device=probs_TE.device)
    return ids_TE, (before_TE < p) | (p >= 1)


def top_p_select(probs_TE: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    """Dense form of the selection: (T, E) bool mask of the kept experts and (T, E) weights that sum to 1.

    Args:
        probs_TE: (T, E) probabilities.
        p: the threshold, in (0, 1].

    Raises:
        ValueError: p outside (0, 1].
    """
    check_threshold(float(p))
    ids_TE, kept_TE = top_p_prefix(probs_TE, p)
    mask_TE = torch.zeros_like(kept_TE).scatter(-1, ids_TE, kept_TE)
    weights_TE = probs_TE * mask_TE
    return mask_TE, weights_TE / weights_TE.sum(-1, keepdim=True)


def check_threshold(p: float) -> None:
    """Refuse a threshold outside (0, 1].

    Raises:
        ValueError: naming it.
    """
    if not (math.isfinite(p) and 0 < p <= 1):
        raise ValueError(f"p must lie in (0, 1], got {p}")
