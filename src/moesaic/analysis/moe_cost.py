"""What an MoE layer costs, counted: parameters, FLOPs, bytes read, bytes sent, and which of them binds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from moesaic.formats.arguments import check_count
from moesaic.layers.latent import LatentMoEConfig


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one device can do.

    Args:
        flops: FLOP/s.
        memory_bandwidth: bytes/s from its memory.
        link_bandwidth: bytes/s to the other devices.

    Raises:
        ValueError: a rate that is not positive.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")


# The example of arXiv:2601.18089: one GB200 at 4 bits.
GB200 = Hardware(flops=10e15, memory_bandwidth=8e12, link_bandwidth=900e9)
# Bytes an element of dispatch (4 bits) and combine (bfloat16) together, in the same example.
EXCHANGE_BYTES = 2.5


@dataclasses.dataclass(frozen=True)
class MoECost:
    """The cost of one MoE layer, for all its experts where nothing else is said.

    Attributes:
        params_total: routed experts, projections, router, shared experts.
        params_active: those that one token multiplies with (the whole router).
        params_routed: routed experts alone.
        flops_per_token: multiply and add counted as 2.
        expert_weight_bytes: weights of the experts that the tokens are expected to reach under even routing, on one
            device.
        all_to_all_bytes: what one device sends for dispatch and combine.
        arithmetic_intensity: FLOP per byte of one matrix of one expert with its even share of tokens.
        seconds: ``memory``, ``compute`` and ``communication``: time of each alone on the given hardware, one device.
        bound: the longest of them.
    """

    params_total: int
    params_active: int
    params_routed: int
    flops_per_token: int
    expert_weight_bytes: float
    all_to_all_bytes: float
    arithmetic_intensity: float
    seconds: dict[str, float]
    bound: str


def moe_cost(
    config: LatentMoEConfig,
    tokens: int,
    *,
    devices: int = 1,
    bytes_per_element: float = 2.0,
    exchange_bytes: float = EXCHANGE_BYTES,
    hardware: Hardware = GB200,
) -> MoECost:
    r"""Cost of one ordinary or latent MoE layer, arXiv:2601.18089.

    With w the width of the rows that experts see (:math:`\ell`, or d), c matrices an expert, per token

    .. math:: \text{FLOP} = 2 c K w m + 4 d \ell\,[\text{latent}] + 2 c\, d\, m_{shared} + 2 d N,

    and per device :math:`b\, T K w / EP` bytes of all-to-all.

    Args:
        config: sizes.
        tokens: T, of the whole batch.
        devices: EP, over which the experts are spread.
        bytes_per_element: of weights and activations.
        exchange_bytes: b, of an element's dispatch and combine together.
        hardware: of one device.

    Raises:
        ValueError: numbers that are not positive, devices that do not divide the experts.
    """
    for name, value in (
        ("tokens", tokens),
        ("devices", devices),
        ("bytes_per_element", bytes_per_element),
        ("exchange_bytes", exchange_bytes),
    ):
        if name in ("tokens", "devices"):
            check_count(name, value)
        elif not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if config.num_experts % devices:
        raise ValueError(f"devices must divide num_experts = {config.num_experts}, got {devices}")
    d, w, m, c = config.hidden_size, config.width, config.expert_size, config.matrices
    experts, top_k = config.num_experts, config.top_k
    projections = 0 if config.latent_size is None else 2 * d * config.latent_size
    always = projections + d * experts + c * d * config.shared_width
    expert = c * w * m

    reached = experts * -math.expm1(tokens * math.log1p(-top_k / experts)) if top_k < experts else experts
    weight_bytes = reached * expert * bytes_per_element / devices
    share = tokens * top_k / experts
    exchanged = exchange_bytes * tokens * top_k * w / devices
    rows_bytes = tokens * top_k / devices * c * (w + m) * bytes_per_element
    seconds = {
        "memory": (weight_bytes + rows_bytes) / hardware.memory_bandwidth,
        "compute": 2 * tokens * top_k * expert / devices / hardware.flops,
        "communication": exchanged / hardware.link_bandwidth if devices > 1 else 0.0,
    }
    return MoECost(
        params_total=experts * expert + always,
        params_active=top_k * expert + always,
        params_routed=experts * expert,
        flops_per_token=2 * (top_k * expert + always),
        expert_weight_bytes=weight_bytes,
        all_to_all_bytes=exchanged,
        arithmetic_intensity=arithmetic_intensity(share, w, m, bytes_per_element),
        seconds=seconds,
        bound=max(seconds, key=seconds.__getitem__),
    )


def arithmetic_intensity(tokens: float, width: int, expert_size: int, bytes_per_element: float = 1.0) -> float:
    r"""FLOP per byte of one matrix of one expert, :math:`2 t w m / (b\,(w m + t (w + m)))`.

    Args:
        tokens: t, rows that the expert gets.
        width: w.
        expert_size: m.
        bytes_per_element: b.
    """
    moved = width * expert_size + tokens * (width + expert_size)
    return 2 * tokens * width * expert_size / (bytes_per_element * moved)


def compute_bound_tokens(
    width: int, expert_size: int, hardware: Hardware = GB200, bytes_per_element: float = 1.0
) -> float:
    """Rows that an expert needs before it is bound by compute instead of by reading its weights.

    Where :func:`arithmetic_intensity` reaches FLOP/s over bytes/s; infinite where no number of rows does.
    """
    ridge = hardware.flops / hardware.memory_bandwidth * bytes_per_element
    room = 2 * width * expert_size - ridge * (width + expert_size)
    return ridge * width * expert_size / room if room > 0 else math.inf


def communication_to_compute(
    expert_size: int, hardware: Hardware = GB200, exchange_bytes: float = EXCHANGE_BYTES
) -> float:
    r"""Time of the all-to-all over that of one matrix of the experts, :math:`b F / (2 m\, BW)`.

    The width and the number of experts cancel: only fewer or narrower rows lower the time, and only a wider expert the
    ratio.
    """
    return exchange_bytes * hardware.flops / (2 * expert_size * hardware.link_bandwidth)


def effective_parameter_multiplier(
    sizes: Sequence[float], scores: Sequence[float], treated_score: float, treated_size: float
) -> float:
    r"""How many times larger an ordinary model would have to be to score as the treated one.

    A line :math:`s = a \ln n + b` is fitted to the ordinary models by least squares, inverted at the treated model's
    score and divided by its size (the paper's EPM).

    Args:
        sizes: parameters of ordinary models, at least two different ones.
        scores: what they reach.
        treated_score: what the treated model reaches.
        treated_size: its parameters.

    Raises:
        ValueError: lists of other lengths, sizes that are not positive, scores that do not change with size.
    """
    if len(sizes) != len(scores) or len(set(sizes)) < 2:
        raise ValueError(f"sizes and scores must be equally long with two different sizes, got {sizes} and {scores}")
    if min(*sizes, treated_size) <= 0:
        raise ValueError(f"sizes must be positive, got {sizes} and treated_size = {treated_size}")
    slope, offset = np.polyfit(np.log(np.asarray(sizes, dtype=np.float64)), np.asarray(scores, dtype=np.float64), 1)
    if abs(slope) < 1e-12:
        raise ValueError(f"scores do not change with size, so no size can be read off: {scores}")
    return float(np.exp((treated_score - offset) / slope) / treated_size)
