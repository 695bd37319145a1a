"""Sizes of a multi-head latent layer, and how they follow from those of an ordinary one."""

from __future__ import annotations

import dataclasses
import math

import torch

from moesaic.experts import ACTIVATIONS, MultiHeadLatentExperts
from moesaic.experts.multi_head_latent import BACKENDS
from moesaic.formats.arguments import check_count
from moesaic.layers.latent import LatentMoEConfig
from moesaic.layers.moe import MoE


@dataclasses.dataclass(frozen=True)
class MultiHeadMoEConfig:
    r"""Sizes of one multi-head latent layer (arXiv:2602.04870); :meth:`build` makes it.

    Args:
        hidden_size: d.
        num_heads: H.
        num_experts: experts **of one head**.
        top_k: k, experts of a head that a sub-token uses.
        expert_size: hidden units of each expert.
        head_size: C; d / H by default.
        activation: of the experts; exact GELU in the paper.
        router_score: ``"softmax"`` or ``"sigmoid"``.
        bias_rate: step of the selection bias that balances each head (the published code: 50 times the peak learning
            rate); 0 for none.
        separate_routing_tokens: route on sub-tokens of their own projection (an ablation).
        streaming: never form the scores of rows by experts.
        backend: of the experts, see :class:`MultiHeadLatentExperts`.
        init_std: standard deviation of all matrices at the start (the published code: 0.02), of W_out divided by
            ``sqrt(2 num_layers)``; None for 1 / sqrt(fan_in).
        num_layers: L, for the initialisation only.

    Raises:
        ValueError: sizes that are not positive, heads that do not divide d without a head size, k above the experts of
            a head, unknown names.
    """

    hidden_size: int
    num_heads: int
    num_experts: int
    top_k: int
    expert_size: int
    head_size: int | None = None
    activation: str = "gelu"
    router_score: str = "softmax"
    bias_rate: float = 0.0
    separate_routing_tokens: bool = False
    streaming: bool = True
    backend: str = "grouped"
    init_std: float | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_experts", "top_k", "expert_size", "head_size", "num_layers"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads must divide hidden_size = {self.hidden_size}, got {self.num_heads}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most the {self.num_experts} experts of a head, got {self.top_k}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {self.activation!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {self.backend!r}")
        if not self.bias_rate >= 0:
            raise ValueError(f"bias_rate must be at least 0, got {self.bias_rate}")

    @property
    def head_width(self) -> int:
        """C."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def matrices(self) -> int:
        """c: matrices of an expert, 3 with a gate and 2 without."""
        return 3 if ACTIVATIONS[self.activation].gated else 2

    @classmethod
    def matched_to(cls, baseline: LatentMoEConfig, num_heads: int, granularity: int = 1) -> MultiHeadMoEConfig:
        r"""The layer with H C = d whose experts have the active and total weights of an ordinary layer's.

        With N experts, top-k K and m hidden units there, each head has :math:`gN` experts of :math:`m / g` units and
        takes :math:`gK`. Projections and routers come on top.

        Args:
            baseline: an ordinary layer.
            num_heads: H, a divisor of d.
            granularity: g, a divisor of m; 2 for "doubled granularity".

        Raises:
            ValueError: a latent baseline, a granularity or number of heads that does not divide.
        """
        if baseline.latent_size is not None:
            raise ValueError(f"baseline must be an ordinary layer, got latent_size = {baseline.latent_size}")
        check_count("granularity", granularity)
        if baseline.expert_size % granularity:
            raise ValueError(f"granularity must divide expert_size = {baseline.expert_size}, got {granularity}")
        return cls(
            baseline.hidden_size,
            num_heads,
            baseline.num_experts * granularity,
            baseline.top_k * granularity,
            baseline.expert_size // granularity,
            activation=baseline.activation,
            bias_rate=baseline.bias_rate,
        )

    def build(self) -> MoE:
        """The layer; it routes itself."""
        bank = MultiHeadLatentExperts(
            self.hidden_size,
            self.expert_size,
            self.num_experts * self.num_heads,
            num_heads=self.num_heads,
            top_k=self.top_k,
            head_size=self.head_size,
            activation=self.activation,
            router={
                "score": self.router_score,
                "bias": self.bias_rate > 0,
                "bias_rate": self.bias_rate,
                "streaming": self.streaming,
            },
            separate_routing_tokens=self.separate_routing_tokens,
            backend=self.backend,
        )
        if self.init_std is not None:
            with torch.no_grad():
                for parameter in bank.parameters():
                    leads_out = parameter is bank.merge_OHC
                    parameter.normal_(0, self.init_std / math.sqrt(2 * self.num_layers) if leads_out else self.init_std)
        return MoE(bank)
