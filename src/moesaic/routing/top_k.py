"""Top-k routing with one learned vector per expert."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.selection import TopKSelection


class TopKRouter(TopKSelection):
    r"""The router of most published models: logits :math:`\ell_t = W x_t`, then the K best experts.

    Softmax without renormalisation is OLMoE and DeepSeek-V2, with it Mixtral and Qwen3-MoE; sigmoid with bias, groups
    and a scale is DeepSeek-V3. The choice, the weights, the selection bias and the noise are those of
    :class:`TopKSelection`.

    Args:
        dim: model width D.
        num_experts: E.
        top_k: K, experts per row.
        **selection: ``score``, ``renormalize``, ``scale``, ``bias``, ``bias_rate``, ``num_groups``, ``top_groups``,
            ``noise_std``, ``seed`` of :class:`TopKSelection`.

    Shapes:
        x_TD -> Routing (T, K).

    Raises:
        ValueError: see :class:`TopKSelection`.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {"weight_ED": ParameterSpec(("expert", "model"), "router")}

    def __init__(self, dim: int, num_experts: int, top_k: int, **selection: Any) -> None:
        super().__init__(dim, num_experts, top_k, **selection)
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(D): logits of unit size on normalised rows."""
        super().reset_parameters()
        nn.init.normal_(self.weight_ED, std=self.dim**-0.5)

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """Logits (T, E) = x W^T."""
        return F.linear(x_TD, self.weight_ED.to(x_TD.dtype))
