"""Sizes of a layer with latent experts, and how they follow from those of an ordinary one."""

from __future__ import annotations

import dataclasses
import math

import torch

from moesaic.experts import ACTIVATIONS, Experts, FFNExperts, SharedExpert
from moesaic.experts.latent import LatentExperts, latent_width
from moesaic.formats.arguments import check_count
from moesaic.layers.moe import MoE
from moesaic.losses.balance import BalanceLoss
from moesaic.routing import TopKRouter, parameter_specs

VARIANTS = ("acc", "eff", "no_expert_scaling")
TOP_K_RULES = ("scale", "matched")


@dataclasses.dataclass(frozen=True)
class LatentMoEConfig:
    r"""Sizes of one MoE layer, ordinary or latent (arXiv:2601.18089); :meth:`build` makes it.

    Args:
        hidden_size: d.
        num_experts: N.
        top_k: K.
        expert_size: m, hidden units of each expert.
        latent_size: :math:`\ell`; None for ordinary experts of the full width d.
        num_shared_experts: S.
        shared_expert_size: hidden units of each shared expert; ``expert_size`` by default.
        activation: ``"swiglu"`` (three matrices an expert), ``"relu2"`` (squared ReLU, two), or another of the house.
        normalize_top_k: divide the chosen scores by their sum (the paper does not say; ours).
        router_score: ``"softmax"`` (the paper's equations) or ``"sigmoid"`` (its production code).
        bias_rate: step of the selection bias that balances loads without a loss; 0 for none.
        balance: coefficient of the balance loss (the paper: 1e-4); 0 for none.
        init_std: standard deviation of matrices at the start (the published code: 0.02), those that lead into the
            residual stream divided by ``sqrt(2 num_layers)``; None for 1 / sqrt(fan_in).
        num_layers: L, for the initialisation only.

    Raises:
        ValueError: sizes that are not positive, K > N, a latent wider than d, unknown names.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    expert_size: int
    latent_size: int | None = None
    num_shared_experts: int = 0
    shared_expert_size: int | None = None
    activation: str = "swiglu"
    normalize_top_k: bool = True
    router_score: str = "softmax"
    bias_rate: float = 0.0
    balance: float = 0.0
    init_std: float | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts", "top_k", "expert_size", "shared_expert_size", "num_layers"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        check_count("num_shared_experts", self.num_shared_experts, 0)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.latent_size is not None:
            latent_width(self.hidden_size, self.latent_size, None)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")
        for name in ("bias_rate", "balance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def width(self) -> int:
        """Width of the rows that experts see, and that dispatch and combine move."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def matrices(self) -> int:
        """c: matrices of an expert, 3 with a gate and 2 without."""
        return 3 if ACTIVATIONS[self.activation].gated else 2

    @property
    def shared_width(self) -> int:
        """Hidden units of all shared experts together."""
        return self.num_shared_experts * (self.shared_expert_size or self.expert_size)

    def latent(self, compression: int, variant: str = "acc", top_k_rule: str = "scale") -> LatentMoEConfig:
        r"""The latent layer that takes the place of this ordinary one.

        Args:
            compression: :math:`\alpha`, a divisor of d.
            variant: ``"acc"`` has :math:`\alpha N` experts and a top-k of :math:`\alpha K` (equal cost, better);
                ``"eff"`` :math:`\alpha N` experts and K (equal quality, cheaper); ``"no_expert_scaling"`` N and K, an
                ablation.
            top_k_rule: of ``"acc"``: ``"scale"`` for :math:`\alpha K` as the paper writes, ``"matched"`` for what
                :func:`matched_top_k` leaves of it.

        Raises:
            ValueError: a layer that is latent already, a compression that does not divide d, unknown names.
        """
        if self.latent_size is not None:
            raise ValueError(
                f"this layer is latent already (latent_size = {self.latent_size}); start from an ordinary one"
            )
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
        if top_k_rule not in TOP_K_RULES:
            raise ValueError(f"top_k_rule must be one of {TOP_K_RULES}, got {top_k_rule!r}")
        latent = latent_width(self.hidden_size, None, compression)
        experts = self.num_experts * (1 if variant == "no_expert_scaling" else compression)
        top_k = self.top_k * (compression if variant == "acc" else 1)
        if variant == "acc" and top_k_rule == "matched":
            top_k = matched_top_k(self, latent, experts)
        return dataclasses.replace(self, latent_size=latent, num_experts=experts, top_k=top_k)

    @classmethod
    def from_baseline(
        cls,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        expert_size: int,
        num_shared_experts: int = 0,
        *,
        compression: int = 4,
        variant: str = "acc",
        top_k_rule: str = "scale",
        activation: str = "swiglu",
    ) -> LatentMoEConfig:
        """:meth:`latent` of the ordinary layer with these sizes."""
        baseline = cls(
            hidden_size,
            num_experts,
            top_k,
            expert_size,
            num_shared_experts=num_shared_experts,
            activation=activation,
        )
        return baseline.latent(compression, variant, top_k_rule)

    def build(self) -> MoE:
        """The layer: router on the full width, (latent) experts, shared experts of the full width added at the end."""
        renormalize = self.normalize_top_k and self.top_k > 1
        router = TopKRouter(
            self.hidden_size,
            self.num_experts,
            self.top_k,
            score=self.router_score,
            renormalize=renormalize,
            bias=self.bias_rate > 0,
            bias_rate=self.bias_rate,
        )
        sizes = (self.hidden_size, self.expert_size, self.num_experts)
        experts: Experts
        if self.latent_size is None:
            experts = FFNExperts(*sizes, activation=self.activation)
        else:
            experts = LatentExperts(*sizes, latent_size=self.latent_size, activation=self.activation)
        shared = SharedExpert(self.hidden_size, self.shared_width, self.activation) if self.shared_width else None
        layer = MoE(experts, router, shared, [BalanceLoss(self.balance)] if self.balance else [])
        if self.init_std is not None:
            _draw(layer, self.init_std, self.init_std / math.sqrt(2 * self.num_layers))
        return layer


@torch.no_grad()
def _draw(layer: MoE, std: float, output_std: float) -> None:
    """Normal weights: ``output_std`` for what leads into the residual stream, ``std`` for all else."""
    for name, parameter, spec in parameter_specs(layer):
        leads_out = spec.role == "expert-out" or name in ("experts.up_OZ", "shared.down.weight")
        parameter.normal_(0, output_std if leads_out else std)


def matched_top_k(baseline: LatentMoEConfig, latent_size: int, num_experts: int) -> int:
    r"""The top-k of a latent layer that has no more active parameters than an ordinary one.

    .. math:: K' = \Big\lfloor \frac{c K d m - 2 d \ell - (N' - N)\, d}{c\, \ell\, m} \Big\rfloor

    The two projections and the wider router are paid for out of the top-k. The rule is ours; the published models fit
    it (K' = 22 where :math:`\alpha K = 24`).

    Args:
        baseline: the ordinary layer.
        latent_size: :math:`\ell`.
        num_experts: N'.

    Raises:
        ValueError: nothing is left for even one expert.
    """
    d, m, c = baseline.hidden_size, baseline.expert_size, baseline.matrices
    budget = c * baseline.top_k * d * m - 2 * d * latent_size - (num_experts - baseline.num_experts) * d
    top_k = min(budget // (c * latent_size * m), num_experts)
    if top_k < 1:
        raise ValueError(
            f"nothing is left for experts: projections and router of latent_size = {latent_size} with {num_experts}"
            f" experts cost more than top_k = {baseline.top_k} experts of the ordinary layer; use fewer experts"
        )
    return top_k
