"""Experts for the heads of a token: a small MoE for each of its sub-tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.experts.activations import Activation
from moesaic.experts.base import Experts
from moesaic.experts.ffn_attention import spans_as_attention
from moesaic.experts.latent import InnerBank, blank_padding
from moesaic.experts.packing import BLOCK_ROWS, pack_tokens
from moesaic.formats.arguments import check_count
from moesaic.routing import Context, MultiHeadRouter, ParameterSpec, Routing

BACKENDS = ("grouped", "packed")


class MultiHeadLatentExperts(Experts):
    r"""Multi-Head LatentMoE (arXiv:2602.04870): the token in H sub-tokens, each with experts and a router of its own.

    .. math:: u = W_{in} x \in \mathbb{R}^{H \times C}, \quad
              o_h = \sum_{e \in S_h} w_{h,e}\, f_{h,e}(u_h), \quad y = W_{out}\, [o_1, \dots, o_H]

    The E experts are H groups of E / H neighbours: expert e works on head :math:`\lfloor e H / E \rfloor`. The bank
    routes itself, on the sub-tokens (``MoE(bank)`` without a router, see :class:`MultiHeadRouter`); a router of the
    full width may be given to the layer instead, and may choose any experts.

    Args:
        dim: D.
        width: hidden units of each expert.
        num_experts: E, of all heads together.
        num_heads: H, a divisor of E.
        head_size: C; D / H by default.
        top_k: k, experts per head.
        activation: of the experts; exact GELU in the paper.
        router: further arguments of :class:`MultiHeadRouter` (``score``, ``bias``, ``streaming`` ...).
        separate_routing_tokens: route on sub-tokens of a projection of their own (the authors' older variant; worse).
        routing_size: their channels; C by default.
        backend: ``"grouped"`` computes experts as any bank of ours does; ``"packed"`` in blocks of one expert, as
            attention with the softmax undone, keeping no hidden activation for the backward.
        block_size: rows of such a block.
        init_scale: every matrix starts normal with standard deviation ``init_scale / sqrt(fan_in)``.
        zero_down: start W_out at zero.

    Shapes:
        x_TD, Routing with T rows -> (T, D).

    Raises:
        ValueError: sizes that are not positive or do not divide, an unknown backend, ``"packed"`` with another
            activation than GELU, what the router refuses.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        num_experts: int,
        *,
        num_heads: int,
        top_k: int,
        head_size: int | None = None,
        activation: str | Activation = "gelu",
        router: Mapping[str, Any] | None = None,
        separate_routing_tokens: bool = False,
        routing_size: int | None = None,
        backend: str = "grouped",
        block_size: int = BLOCK_ROWS,
        init_scale: float = 1.0,
        zero_down: bool = False,
    ) -> None:
        super().__init__(dim, num_experts)
        num_heads = check_count("num_heads", num_heads)
        if num_experts % num_heads:
            raise ValueError(f"num_heads must divide num_experts = {num_experts}, got {num_heads}")
        if head_size is None and dim % num_heads:
            raise ValueError(f"num_heads must divide the model width {dim}, or give head_size; got {num_heads}")
        head_size = dim // num_heads if head_size is None else head_size
        if routing_size is not None and not separate_routing_tokens:
            raise ValueError(f"routing_size = {routing_size} needs separate_routing_tokens=True")
        routing_size = head_size if routing_size is None else routing_size
        for name, value in (("head_size", head_size), ("routing_size", routing_size), ("block_size", block_size)):
            check_count(name, value)
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.num_heads, self.head_size, self.head_experts = num_heads, head_size, num_experts // num_heads
        self.backend, self.block_size = backend, block_size
        self.init_scale, self.zero_down = init_scale, zero_down
        self.router = MultiHeadRouter(
            num_heads * routing_size, num_experts, top_k, num_heads=num_heads, **dict(router or {})
        )
        self.top_k = self.router.top_k
        self.split_HCD = nn.Parameter(torch.empty(num_heads, head_size, dim))
        self.routing_HCD = nn.Parameter(torch.empty(num_heads, routing_size, dim)) if separate_routing_tokens else None
        self.bank = _HeadBank(head_size, width, num_experts, activation=activation, init_scale=init_scale)
        self.merge_OHC = nn.Parameter(torch.empty(dim, num_heads, head_size))
        if backend == "packed" and self.bank.activation.name != "gelu":
            raise ValueError(
                f'backend="packed" computes GELU experts only, got activation={self.bank.activation.name!r}'
            )
        self.reset_parameters()

    @property
    def parameter_axes(self) -> Mapping[str, ParameterSpec]:
        """Axes and role of each parameter."""
        return {
            "split_HCD": ParameterSpec(("head", "channel", "model"), "dense"),
            "routing_HCD": ParameterSpec(("head", "channel", "model"), "router"),
            "merge_OHC": ParameterSpec(("out", "head", "channel"), "dense"),
        }

    @property
    def width(self) -> int:
        """Hidden units of each expert."""
        return self.bank.width

    @property
    def shared_parameters(self) -> int:
        """Parameters that every row passes through: projections and routers."""
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith("bank."))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights of projections and experts; the router resets itself."""
        self.bank.reset_parameters(generator)
        for weight in (self.split_HCD, self.routing_HCD):
            if weight is not None:
                weight.normal_(0, self.init_scale / math.sqrt(self.dim), generator=generator)
        std = self.init_scale / math.sqrt(self.num_heads * self.head_size)
        self.merge_OHC.normal_(0, 0.0 if self.zero_down else std, generator=generator)

    def route(self, x_TD: Tensor, context: Context) -> Routing:
        """Every head's own choice on its sub-token."""
        clean_TD = blank_padding(x_TD, context)
        u_THC = self.split(clean_TD)
        tokens_THC = u_THC if self.routing_HCD is None else _project(clean_TD, self.routing_HCD)
        routing: Routing = self.router(tokens_THC.flatten(1), context)
        return routing.replace(extras={**routing.extras, "sub_tokens": _SubTokens(x_TD, u_THC)})

    def forward(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Split, compute each head's experts, merge."""
        context = self.check_input(x_TD, routing, context)
        if type(self).rows is not MultiHeadLatentExperts.rows or type(self).combine is not Experts.combine:
            return self.combine(self.outputs(x_TD, routing, context), routing)
        kept = routing.extras.get("sub_tokens")
        u_THC = kept.take(x_TD) if isinstance(kept, _SubTokens) else None
        u_THC = self.split(blank_padding(x_TD, context)) if u_THC is None else u_THC
        return self.merge(self.heads(u_THC, routing))

    def split(self, x_TD: Tensor) -> Tensor:
        """Sub-tokens: (T, D) -> (T, H, C)."""
        if not torch.is_autocast_enabled(x_TD.device.type):
            self.refuse_other_dtype(x_TD, self.split_HCD)
        return _project(x_TD, self.split_HCD)

    def heads(self, u_THC: Tensor, routing: Routing) -> Tensor:
        """What the experts of each head give: (T, H, C) -> (T, H, C)."""
        rows = u_THC.shape[0]
        ids_THK, weights_THK = self.by_head(routing)
        if self.backend == "packed":
            return self._packed(u_THC, ids_THK, weights_THK)
        slots = ids_THK.shape[2]
        inner = Routing(ids_THK.reshape(-1, slots), weights_THK.reshape(-1, slots), self.num_experts)
        y: Tensor = self.bank(u_THC.reshape(rows * self.num_heads, self.head_size), inner)
        return y.view(rows, self.num_heads, self.head_size)

    def merge(self, o_THC: Tensor) -> Tensor:
        """Heads joined and projected: (T, H, C) -> (T, D)."""
        return F.linear(o_THC.flatten(1), self.merge_OHC.flatten(1))

    def by_head(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Ids and weights as decisions of sub-tokens, (T, H, K'); a slot of another head's expert is empty."""
        ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
        rows, slots = ids_TK.shape
        head_H1 = torch.arange(self.num_heads, device=ids_TK.device)[:, None]
        if slots and slots % self.num_heads == 0:  # the order in which our own router writes: head after head
            ids_THK = ids_TK.view(rows, self.num_heads, slots // self.num_heads)
            if bool(((ids_THK // self.head_experts == head_H1) | (ids_THK == self.num_experts)).all()):
                return ids_THK, weights_TK.view(ids_THK.shape)
        other_THK = (ids_TK // self.head_experts)[:, None] != head_H1
        ids_THK = ids_TK[:, None].expand(-1, self.num_heads, -1).masked_fill(other_THK, self.num_experts)
        return ids_THK, weights_TK[:, None].expand(-1, self.num_heads, -1).masked_fill(other_THK, 0.0)

    def rows(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        """(N, D) rows sorted by expert -> (N, D): each expert as a function of the full width."""
        per_head = [
            sum(counts[first : first + self.head_experts]) for first in range(0, len(counts), self.head_experts)
        ]
        u_NC = torch.cat([F.linear(x, w) for x, w in zip(x_ND.split_with_sizes(per_head), self.split_HCD, strict=True)])
        y_NC = self.bank.rows(u_NC, counts, context).split_with_sizes(per_head)
        return torch.cat([F.linear(y, w) for y, w in zip(y_NC, self.merge_OHC.unbind(1), strict=True)])

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Weights of the experts ``ids`` on their sub-tokens, as :meth:`FFNExperts.weights` gives them."""
        return self.bank.weights(ids)

    def _packed(self, u_THC: Tensor, ids_THK: Tensor, weights_THK: Tensor) -> Tensor:
        head_H11 = torch.arange(self.num_heads, device=ids_THK.device)[:, None, None]
        ids_HTK = ids_THK.transpose(0, 1)
        local_HTK = torch.where(ids_HTK < self.num_experts, ids_HTK - head_H11 * self.head_experts, self.head_experts)
        packing = pack_tokens(local_HTK, self.head_experts, self.block_size)
        x_HPC = packing.pack(u_THC.transpose(0, 1))
        experts = (packing.block_expert_HB + head_H11[..., 0] * self.head_experts).flatten().tolist()
        up_EFC, down_EFC = self.bank.up_EFD.to(x_HPC.dtype), self.bank.down_EDF.transpose(1, 2).to(x_HPC.dtype)
        spans = list(_spans(experts, self.block_size))
        y_HPC = spans_as_attention(x_HPC.flatten(0, 1), up_EFC, down_EFC, spans).view_as(x_HPC)
        y_HTKC = packing.unpack(y_HPC)
        weights_HTK = weights_THK.transpose(0, 1).to(torch.promote_types(y_HTKC.dtype, torch.float32))
        o_HTC = (y_HTKC * weights_HTK[..., None]).sum(2).to(y_HTKC.dtype)
        return o_HTC.transpose(0, 1)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim} -> {self.num_heads} heads of {self.head_size}, backend={self.backend!r}"


class _HeadBank(InnerBank):
    row_axis = "channel"


@dataclasses.dataclass(eq=False)
class _SubTokens:
    """Sub-tokens on their way from routing to experts, for that input only and once, so that nothing is kept alive."""

    x_TD: Tensor | None
    u_THC: Tensor | None

    def take(self, x_TD: Tensor) -> Tensor | None:
        u_THC = self.u_THC if x_TD is self.x_TD else None
        self.x_TD = self.u_THC = None
        return u_THC


def _project(x_TD: Tensor, weight_HCD: Tensor) -> Tensor:
    return F.linear(x_TD, weight_HCD.flatten(0, 1)).view(x_TD.shape[0], *weight_HCD.shape[:2])


def _spans(experts: Sequence[int], block_size: int) -> Sequence[tuple[int, int, int]]:
    """Neighbouring blocks of one expert joined: (expert, first row, last row + 1)."""
    spans, first = [], 0
    for expert, blocks in groupby(experts):
        last = first + block_size * len(list(blocks))
        spans.append((expert, first, last))
        first = last
    return spans
