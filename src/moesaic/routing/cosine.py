"""Cosine routing on a low-dimensional sphere."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.formats.arguments import check_count
from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.selection import TopKSelection

TEMPERATURE_FLOOR = 0.01


class CosineRouter(TopKSelection):
    r"""Cosine router of X-MoE, arXiv:2204.09179.

    Tokens are projected to a lower dimension and compared with expert embeddings on the unit sphere,

    .. math:: \ell_{t,e} = \frac{1}{\tau} \, \frac{P x_t}{\lVert P x_t \rVert} \cdot \frac{v_e}{\lVert v_e \rVert},

    with a learned temperature :math:`\tau`; then the K best experts as in :class:`TopKSelection`. Norms of tokens no
    longer draw them to an expert, which counters the collapse of representations onto expert vectors. The paper clips
    :math:`\tau` at 0.01; here :math:`\tau = 0.01 + e^\theta`, which has the same floor and keeps its gradient near it.

    Args:
        dim: model width D.
        num_experts: E.
        top_k: K, experts per row.
        routing_dim: dimension R of the sphere; None for max(8, E / 2), at most D (the paper takes E / 2).
        temperature: start value of :math:`\tau`, above 0.01 (0.3 in the paper).
        **selection: keyword arguments of :class:`TopKSelection`.

    Shapes:
        x_TD -> Routing (T, K). A row of zeros has logits 0.

    Raises:
        ValueError: ``routing_dim`` outside [1, D], a temperature not above 0.01; see also :class:`TopKSelection`.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {
        "projection_RD": ParameterSpec(("out", "model"), "router"),
        "weight_ER": ParameterSpec(("expert", "in"), "router"),
        "temperature_log": ParameterSpec((), "scalar"),
    }

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        routing_dim: int | None = None,
        temperature: float = 0.3,
        **selection: Any,
    ) -> None:
        super().__init__(dim, num_experts, top_k, **selection)
        routing_dim = min(dim, max(8, num_experts // 2)) if routing_dim is None else routing_dim
        routing_dim = check_count("routing_dim", routing_dim, 1, dim, f"dim = {dim}")
        if not (math.isfinite(temperature) and temperature > TEMPERATURE_FLOOR):
            raise ValueError(f"temperature must be finite and above {TEMPERATURE_FLOOR}, got {temperature}")
        self.routing_dim = routing_dim
        self.start_temperature = temperature
        self.projection_RD = nn.Parameter(torch.empty(routing_dim, dim, dtype=torch.float32))
        self.weight_ER = nn.Parameter(torch.empty(num_experts, routing_dim, dtype=torch.float32))
        self.temperature_log = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal projection and embeddings of about unit length, the temperature at its start."""
        super().reset_parameters()
        nn.init.normal_(self.projection_RD, std=self.dim**-0.5)
        nn.init.normal_(self.weight_ER, std=self.routing_dim**-0.5)
        nn.init.constant_(self.temperature_log, math.log(self.start_temperature - TEMPERATURE_FLOOR))

    @property
    def temperature(self) -> Tensor:
        """The temperature, a scalar above 0.01, with gradient."""
        return TEMPERATURE_FLOOR + self.temperature_log.exp()

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Cosines (T, E) over the temperature."""
        x_TR = F.normalize(F.linear(x_TD, self.projection_RD.to(x_TD.dtype)), dim=-1)
        v_ER = F.normalize(self.weight_ER.to(x_TD.dtype), dim=-1)
        return F.linear(x_TR, v_ER) / self.temperature.to(x_TD.dtype)
