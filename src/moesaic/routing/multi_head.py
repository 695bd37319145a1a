"""Several independent top-k routers side by side, one for each head of a token."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.routing.checks import checking
from moesaic.routing.context import Context
from moesaic.routing.parameters import ParameterSpec
from moesaic.routing.router import Router, top_k_lower_index
from moesaic.routing.routing import Routing, gather_slots
from moesaic.routing.selection import SCORES, loss_free_move
from moesaic.routing.state import StepCounter
from moesaic.routing.streaming import TILE_EXPERTS, streaming_top_k


class MultiHeadRouter(Router):
    r"""A router for each head of a row (Multi-Head LatentMoE, arXiv:2602.04870).

    A row is H sub-tokens :math:`u_h` of C channels, the E experts are H groups of E / H neighbours. In each head, in
    float32,

    .. math:: s_h = R_h u_h, \qquad S_h = \mathrm{top}k\,(s_h + b_h), \qquad
              w_{h,e} = e^{s_{h,e}} \Big/ \sum_{j \in S_h} e^{s_{h,j}},

    so a row uses H k experts and its weights sum to H. The softmax is over the chosen only, of scores without bias.
    With ``score="sigmoid"`` the weights are the sigmoids of the chosen scores.

    Loss-free balancing in each head: with the load :math:`n` of the optimizer step
    :math:`b \mathrel{+}= u\,(\delta - \bar\delta)`, :math:`\delta = \mathrm{sign}(\bar n - n)`.

    ``streaming`` never forms the (T, E) scores (see :func:`streaming_top_k`); the routing then has no ``logits_TE``, so
    no probabilities: losses on them and ``call.choose`` are refused. Without it ``logits_TE`` are normalised inside
    each head, so that the probabilities of a head sum to 1 / H; choice and weights are the same.

    Args:
        dim: H C, width of a row.
        num_experts: E, of all heads together.
        top_k: k, experts per head.
        num_heads: H, a divisor of both.
        score: ``"softmax"`` or ``"sigmoid"``.
        bias: keep a selection bias, the float32 buffer ``selection_bias_E``.
        bias_rate: u (the published code: 50 times the peak learning rate).
        streaming: see above.
        tile: experts of a head at a time when streaming.
        allow_constant_gate: accept k = 1 with softmax, where every weight is 1 and the router gets no gradient.

    Shapes:
        x (T, H C) -> Routing (T, H k), k slots a head, best first, equal scores to the lower id.

    Raises:
        ValueError: heads that divide not both, k outside [1, E / H], k = 1 with softmax, values out of range.
    """

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {
        "keys_EC": ParameterSpec(("expert", "channel"), "router"),
    }
    selection_bias_E: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        num_heads: int,
        score: str = "softmax",
        bias: bool = False,
        bias_rate: float = 1e-2,
        streaming: bool = True,
        tile: int = TILE_EXPERTS,
        allow_constant_gate: bool = False,
    ) -> None:
        super().__init__(dim, num_experts)
        num_heads = check_count("num_heads", num_heads)
        if dim % num_heads or num_experts % num_heads:
            raise ValueError(
                f"num_heads must divide the width {dim} and the number of experts {num_experts}, got {num_heads}"
            )
        of_a_head = num_experts // num_heads
        top_k = check_count("top_k", top_k, 1, of_a_head, f"the {of_a_head} experts of a head")
        if score not in SCORES:
            raise ValueError(f"score must be one of {SCORES}, got {score!r}")
        if top_k == 1 and score == "softmax" and not allow_constant_gate:
            raise ValueError(
                "top_k = 1 makes every softmax weight 1, so the router gets no gradient and cannot learn: use"
                ' top_k >= 2, score="sigmoid", or allow_constant_gate=True'
            )
        if not math.isfinite(bias_rate) or bias_rate < 0:
            raise ValueError(f"bias_rate must be finite and >= 0, got {bias_rate}")
        tile = check_count("tile", tile)
        self.num_heads, self.head_size, self.head_experts = num_heads, dim // num_heads, num_experts // num_heads
        self.head_top_k, self.top_k = top_k, top_k * num_heads
        self.score_function = score
        self.bias_rate, self.has_bias = bias_rate, bias
        self.streaming, self.tile = streaming, tile
        self.keys_EC = nn.Parameter(torch.empty(num_experts, self.head_size, dtype=torch.float32))
        if bias:
            self.register_buffer("selection_bias_E", torch.zeros(num_experts, dtype=torch.float32))
        self._load = StepCounter(num_experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(C): scores of unit size on normalised sub-tokens."""
        nn.init.normal_(self.keys_EC, std=self.head_size**-0.5)
        if self.has_bias:
            self.selection_bias_E.zero_()

    def forward(self, x_TD: Tensor, context: Context | None = None) -> Routing:
        """Route the sub-tokens of each row; see the class."""
        if not self.streaming:
            return super().forward(x_TD, context)
        context = self.check_input(x_TD, context)
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
            if context.token_mask_T is not None:
                x_TD = x_TD.masked_fill(~context.token_mask_T[:, None], 0.0)
            x_HTC = x_TD.view(-1, self.num_heads, self.head_size).transpose(0, 1)
            keys_HEC = self.keys_EC.to(x_TD.dtype).view(self.num_heads, self.head_experts, self.head_size)
            self._check_keys()
            values_HTK, ids_HTK = streaming_top_k(x_HTC, keys_HEC, self.head_top_k, self._bias_HE(), tile=self.tile)
            values_TK = values_HTK.transpose(0, 1).flatten(1)
            self.check_scores(values_TK, context)
            ids_TK = (ids_HTK.transpose(0, 1) + self._first_H1()).flatten(1)
            weights_HTK = values_HTK.softmax(-1) if self.score_function == "softmax" else values_HTK.sigmoid()
            weights_TK = weights_HTK.transpose(0, 1).flatten(1)
            if context.token_mask_T is not None:
                padded_T1 = ~context.token_mask_T[:, None]
                ids_TK = ids_TK.masked_fill(padded_T1, self.num_experts)
                weights_TK = weights_TK.masked_fill(padded_T1, 0.0)
            routing = Routing(
                ids_TK,
                weights_TK,
                self.num_experts,
                token_mask_T=context.token_mask_T,
                score_function=self.score_function,
            )
            if self.counting():
                self.observe(routing)
        return routing

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        """(T, E) scores; with softmax normalised to 1 / H in each head."""
        keys_HEC = self.keys_EC.to(x_TD.dtype).view(self.num_heads, self.head_experts, self.head_size)
        scores_THE = torch.einsum("thc,hec->the", x_TD.view(-1, self.num_heads, self.head_size), keys_HEC)
        if self.score_function == "softmax":
            scores_THE = scores_THE.log_softmax(-1) - math.log(self.num_heads)
        return scores_THE.flatten(1)

    def restrict(self, logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
        """See :meth:`Router.restrict`; with softmax each head's scores are normalised over its allowed experts."""
        shape = (logits_TE.shape[0] * self.num_heads, self.head_experts)
        masked = super().restrict(logits_TE.view(shape), allowed_TE.reshape(shape))
        if self.score_function == "softmax":
            masked = masked.log_softmax(-1) - math.log(self.num_heads)
        return masked.view(logits_TE.shape)

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """The k best allowed experts of each head, by score plus bias."""
        scores_TE = logits_TE.detach()
        if self.has_bias:
            scores_TE = scores_TE + self.selection_bias_E.to(scores_TE.dtype)
        if allowed_TE is not None:
            scores_TE = scores_TE.masked_fill(~allowed_TE, -torch.inf)
        scores = scores_TE.view(-1, self.head_experts)
        ids = top_k_lower_index(scores, self.head_top_k)
        shape = (logits_TE.shape[0], self.num_heads, self.head_top_k)
        ids_TK = (ids.view(shape) + self._first_H1()).flatten(1)
        empty_TK = (scores.gather(1, ids) == -torch.inf).view(ids_TK.shape)
        return ids_TK.masked_fill(empty_TK, self.num_experts) if allowed_TE is not None else ids_TK

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """Softmax over the chosen experts of each head, however many and in whatever slots; or their sigmoids."""
        picked_TK = gather_slots(logits_TE, ids_TK)
        empty_TK = ids_TK == self.num_experts
        if self.score_function == "sigmoid":
            return picked_TK.sigmoid().masked_fill(empty_TK, 0.0)
        head_TK = ids_TK // self.head_experts  # H in empty slots
        shape = (ids_TK.shape[0], self.num_heads + 1)
        best_TH = picked_TK.new_full(shape, -torch.inf).scatter_reduce(1, head_TK, picked_TK.detach(), "amax")
        raised_TK = (picked_TK - best_TH.gather(1, head_TK)).exp().masked_fill(empty_TK, 0.0)
        total_TH = picked_TK.new_zeros(shape).scatter_add(1, head_TK, raised_TK)
        return raised_TK / total_TH.gather(1, head_TK).masked_fill(empty_TK, 1.0)

    def observe(self, routing: Routing) -> None:
        """Count loads for the bias."""
        if self.has_bias and self.bias_rate > 0:
            self._load.add(routing.load_E)

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the selection bias of each head by its loads of the step."""
        if self.has_bias and self.bias_rate > 0:
            load_HE = self._load.drain(self.selection_bias_E.device).view(self.num_heads, self.head_experts)
            self.selection_bias_E += loss_free_move(load_HE, self.bias_rate).flatten()

    def _bias_HE(self) -> Tensor | None:
        return self.selection_bias_E.view(self.num_heads, self.head_experts) if self.has_bias else None

    def _first_H1(self) -> Tensor:
        """(H, 1) id of each head's first expert."""
        return torch.arange(0, self.num_experts, self.head_experts, device=self.keys_EC.device)[:, None]

    def _check_keys(self) -> None:
        # A score that is not finite may lose against the others and stay unseen: the weights are looked at themselves.
        if checking(self.keys_EC) and not bool(torch.isfinite(self.keys_EC.detach()).all()):
            raise ValueError(
                f"scores are not finite in layer {self.layer_name or '(unnamed)'}, router {type(self).__name__}: its"
                " weights hold NaN or inf"
            )

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        sizes = f"{self.num_heads} heads of {self.head_size} -> {self.head_experts}, top_k={self.head_top_k}"
        return f"{sizes}, {self.score_function}, bias={self.has_bias}, streaming={self.streaming}"
