"""Routing statistics of a model on a text, gathered batch by batch in flat memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.layers.intervention import Call
from moesaic.models import moe_layers, record_routing

OVERLOADED = 2.0  # times the mean load


@dataclasses.dataclass
class LayerStatistics:
    """What one MoE layer did with a text.

    Attributes:
        name: module path.
        index: position among the MoE layers.
        num_experts: E.
        top_k: experts per token that the model is built for; None where the router takes a variable number.
        load_E: (E,) int64 decisions that used each expert.
        importance_E: (E,) float64 sum of combine weights.
        profile_E: (E,) float64 sum over tokens of each row's probabilities in descending order.
        entropy: sum over tokens of the entropy in nats.
        rows: decisions counted (padding left out).
        rows_with_probs: rows whose router formed logits.
    """

    name: str
    index: int
    num_experts: int
    top_k: int | None
    load_E: Tensor
    importance_E: Tensor
    profile_E: Tensor
    entropy: float = 0.0
    rows: int = 0
    rows_with_probs: int = 0

    def share_E(self) -> Tensor:
        """(E,) share of all assignments that each expert got; zeros before any."""
        return self.load_E.double() / max(int(self.load_E.sum()), 1)

    def dead(self) -> list[int]:
        """Experts that no token reached."""
        return torch.nonzero(self.load_E == 0).flatten().tolist()

    def overloaded(self, factor: float = OVERLOADED) -> list[int]:
        """Experts with more than ``factor`` times the mean load."""
        return torch.nonzero(self.share_E() * self.num_experts > factor).flatten().tolist()

    def mean_entropy(self) -> float | None:
        """Mean entropy of the routing probabilities in nats; None where the router forms none."""
        return self.entropy / self.rows_with_probs if self.rows_with_probs else None

    def mean_profile(self) -> list[float] | None:
        """Mean of the sorted routing probabilities, best first; None where the router forms none."""
        return (self.profile_E / self.rows_with_probs).tolist() if self.rows_with_probs else None

    def active_per_token(self) -> float:
        """Mean number of experts that a token used."""
        return float(self.load_E.sum()) / max(self.rows, 1)

    def add(self, call: Call) -> None:
        """Count one call of the layer."""
        routing = call.routing
        real = routing.real_T
        self.load_E += routing.load_E.cpu()
        self.importance_E += routing.importance_E.detach().double().cpu()
        self.rows += int(real.sum())
        if routing.logits_TE is not None and bool(real.any()):
            probs = routing.probs_TE.detach()[real].double()
            self.profile_E += probs.sort(dim=1, descending=True).values.sum(0).cpu()
            self.entropy += float(routing.entropy_T.detach().double().sum())
            self.rows_with_probs += int(real.sum())


@dataclasses.dataclass
class RoutingStatistics:
    """Statistics of all MoE layers of a model on one text.

    Attributes:
        layers: one entry a layer, in order.
        coactivation: for neighbouring layers (l, l + 1) the (E_l, E_{l+1}) int64 counts of tokens that used both.
        tokens: tokens of the text (padding left out).
        top_experts_LT: the first expert of each of the first tokens, layer by layer, for colouring text (-1: none).
        token_ids_T: those tokens.
    """

    layers: list[LayerStatistics]
    coactivation: list[Tensor]
    tokens: int
    top_experts_LT: list[list[int]]
    token_ids_T: list[int]


@torch.no_grad()
def routing_statistics(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], coloured: int = 600
) -> RoutingStatistics:
    """Run ``model`` over ``batches`` and count where its tokens go.

    Memory does not grow with the text: each batch's routings are reduced to counts before the next one.

    Args:
        model: ours or any family that :func:`moesaic.moe_layers` knows; it is put into eval mode while it runs.
        batches: keyword arguments of the model's forward, with ``input_ids`` (B, S) and optionally ``attention_mask``.
        coloured: how many tokens keep their experts, for the coloured text.

    Raises:
        ValueError: no MoE layer, no batch.
    """
    handles = moe_layers(model)
    layers = [_empty(handle.name, handle.index, handle.num_experts, handle.top_k) for handle in handles]
    coactivation = [
        torch.zeros(low.num_experts, high.num_experts, dtype=torch.int64) for low, high in itertools.pairwise(layers)
    ]
    tokens, ids_T = 0, list[int]()
    tops: list[list[int]] = [[] for _ in layers]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            with record_routing(model) as record:
                model(**batch)
            first = _first_calls(record.calls, len(layers))
            for call in record.calls:
                layers[call.layer.index].add(call)
            for low, (a, b) in enumerate(itertools.pairwise(first)):
                if a is not None and b is not None and a.routing.num_rows == b.routing.num_rows:
                    coactivation[low] += (
                        (a.routing.mask_TE.double().T @ b.routing.mask_TE.double()).round().long().cpu()
                    )
            mask = batch.get("attention_mask")
            keep = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
            tokens += int(keep.sum())
            room = coloured - len(ids_T)
            if room > 0:
                ids_T += batch["input_ids"][keep][:room].tolist()
                for row, call in zip(tops, first, strict=True):
                    row += _top(call, keep.reshape(-1), room)
    finally:
        model.train(was_training)
    if not tokens:
        raise ValueError("batches held no token: give a text")
    return RoutingStatistics(layers, coactivation, tokens, tops, ids_T)


def _empty(name: str, index: int, num_experts: int, top_k: int | None) -> LayerStatistics:
    zeros = torch.zeros(num_experts, dtype=torch.float64)
    return LayerStatistics(name, index, num_experts, top_k, zeros.long(), zeros.clone(), zeros.clone())


def _first_calls(calls: Sequence[Call], count: int) -> list[Call | None]:
    first: list[Call | None] = [None] * count
    for call in calls:
        if first[call.layer.index] is None:
            first[call.layer.index] = call
    return first


def _top(call: Call | None, keep_T: Tensor, room: int) -> list[int]:
    """Expert with the largest weight of each kept token; -1 where it used none or the layer did not run per token."""
    if call is None or call.routing.num_rows != keep_T.shape[0] or call.routing.slots == 0:
        return [-1] * min(room, int(keep_T.sum()))
    routing = call.routing
    best_T = routing.weights_TK.masked_fill(~routing.filled_TK, float("-inf")).argmax(1, keepdim=True)
    ids_T = routing.expert_ids_TK.gather(1, best_T).squeeze(1)
    ids_T = ids_T.masked_fill(ids_T == routing.num_experts, -1)
    result: list[int] = ids_T[keep_T][:room].tolist()
    return result


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        total: all, tied ones once.
        active: those that one token passes through: everything but the routed experts it does not use.
        experts: those in routed experts.
        routers: those of the routers.
    """

    total: int
    active: int
    experts: int
    routers: int


def parameter_count(model: nn.Module, experts_per_token: Sequence[float] | None = None) -> ParameterCount:
    """Count total and active parameters.

    A module that says how many of its parameters one token reads (``active_parameters``, as n-gram tables do) is
    believed; everything else outside the experts counts as active, the token embedding too.

    Args:
        model: the model.
        experts_per_token: measured mean of each MoE layer; by default its top-k (all experts where it has none).

    Raises:
        ValueError: a model without an MoE layer, or another number of layers than ``experts_per_token`` has.
    """
    handles = moe_layers(model)
    if experts_per_token is None:
        experts_per_token = [handle.num_experts if handle.top_k is None else handle.top_k for handle in handles]
    if len(experts_per_token) != len(handles):
        got = len(experts_per_token)
        raise ValueError(f"experts_per_token has {got} numbers, the model {len(handles)} MoE layers")
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = routers = idle = 0
    for handle, used in zip(handles, experts_per_token, strict=True):
        module = _module(handle.experts)
        # Projections that all experts share are read whatever the experts are.
        bank = sum(parameter.numel() for parameter in module.parameters()) - getattr(module, "shared_parameters", 0)
        experts += bank
        idle += round(bank * (1 - min(used, handle.num_experts) / handle.num_experts))
        routers += sum(parameter.numel() for parameter in _module(handle.router).parameters()) if handle.router else 0
    for module in model.modules():
        read = getattr(module, "active_parameters", None)
        if isinstance(read, int):
            idle += sum(parameter.numel() for parameter in module.parameters()) - read
    return ParameterCount(total, total - idle, experts, routers)


def _module(part: object) -> nn.Module:
    """The module behind a router or bank, ours or a foreign one's."""
    module = part if isinstance(part, nn.Module) else getattr(part, "module", None)
    assert isinstance(module, nn.Module)
    return module
