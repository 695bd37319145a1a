"""What a multi-head latent layer costs: parameters, FLOPs, memory of routing, bytes between devices."""

from __future__ import annotations

import dataclasses

from moesaic.formats.arguments import check_count
from moesaic.layers.latent import LatentMoEConfig
from moesaic.layers.multi_head_latent import MultiHeadMoEConfig


@dataclasses.dataclass(frozen=True)
class MultiHeadCost:
    """The cost of one layer.

    Attributes:
        params_total: projections, routers and experts.
        params_active: those that one token multiplies with (all routers).
        flops_per_token: multiply and add counted as 2.
        active_expert_weights: of the experts that one token uses.
        total_expert_weights: of all experts.
        dense_routing_bytes: what dense routing keeps of a token for its backward: float32 scores of every expert.
        streaming_routing_bytes: what streaming routing keeps: k values and k 32-bit ids a head.
    """

    params_total: int
    params_active: int
    flops_per_token: int
    active_expert_weights: int
    total_expert_weights: int
    dense_routing_bytes: int
    streaming_routing_bytes: int


def multi_head_cost(config: MultiHeadMoEConfig) -> MultiHeadCost:
    r"""Cost of a multi-head latent layer, with c matrices an expert:

    .. math:: \text{FLOP} = 4 d H C + 2 H C N_e + 2 c H k C m, \qquad
              \text{parameters} = 2 d H C + H C N_e + c H N_e C m

    (and :math:`2 d H C`, :math:`d H C` more for separate routing tokens).
    """
    d, heads, channels, experts = config.hidden_size, config.num_heads, config.head_width, config.num_experts
    expert = config.matrices * channels * config.expert_size
    projections = (3 if config.separate_routing_tokens else 2) * d * heads * channels
    always = projections + heads * channels * experts
    return MultiHeadCost(
        params_total=always + heads * experts * expert,
        params_active=always + heads * config.top_k * expert,
        flops_per_token=2 * (always + heads * config.top_k * expert),
        active_expert_weights=heads * config.top_k * expert,
        total_expert_weights=heads * experts * expert,
        dense_routing_bytes=4 * heads * experts,
        streaming_routing_bytes=8 * heads * config.top_k,
    )


def head_parallel_bytes(config: MultiHeadMoEConfig, tokens: int, world: int, bytes_per_element: int = 4) -> int:
    r"""Bytes that one of W devices sends in the forward of one layer whose heads are spread over them.

    .. math:: 2\, T\, H C\, \tfrac{W - 1}{W}\, b

    to and back, equal to every other device and the same for every k; the backward sends as much again.

    Args:
        config: sizes.
        tokens: T, of one device.
        world: W.
        bytes_per_element: b.

    Raises:
        ValueError: numbers below 1, W that does not divide the heads.
    """
    _check(tokens, world, bytes_per_element)
    if config.num_heads % world:
        raise ValueError(f"world must divide num_heads = {config.num_heads}, got {world}")
    return 2 * tokens * config.num_heads // world * (world - 1) * config.head_width * bytes_per_element


def expert_parallel_bytes(config: LatentMoEConfig, tokens: int, world: int, bytes_per_element: int = 4) -> float:
    r"""Bytes that one of W devices is expected to send in the forward of one layer whose experts are spread over them.

    .. math:: 2\, K\, T\, w\, \tfrac{W - 1}{W}\, b

    under even routing, with rows of width w; beside them the counts of every expert go round. Arguments and errors as
    in :func:`head_parallel_bytes`.
    """
    _check(tokens, world, bytes_per_element)
    return 2 * config.top_k * tokens * config.width * (world - 1) / world * bytes_per_element


def _check(tokens: int, world: int, bytes_per_element: int) -> None:
    for name, value in (("tokens", tokens), ("world", world), ("bytes_per_element", bytes_per_element)):
        check_count(name, value)
