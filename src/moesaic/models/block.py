"""One layer of the reference language model, and how its parts are made from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from moesaic.experts import SharedExpert
from moesaic.layers import MoE
from moesaic.layers.attention import Attention
from moesaic.layers.norm import Norm
from moesaic.layers.shift import CausalShift
from moesaic.models.configuration import MoesaicConfig
from moesaic.models.history import History
from moesaic.models.parts import BANK_ROUTES, EXPERTS, LOSSES, ROUTERS, SHARED, build
from moesaic.routing import Context, Router, Routing

# Mark on a Linear whose weights start at zero.
STARTS_AT_ZERO = "starts_at_zero"


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What all layers of one forward share."""

    context: Context
    mask: Tensor | None
    real_BS1: Tensor | None
    rotary: tuple[Tensor, Tensor]
    attend: Callable[..., Any]
    options: dict[str, Any]


class MoesaicBlock(GradientCheckpointingLayer):
    """Attention, then a dense or an MoE feed-forward, each with a norm before and a residual around."""

    def __init__(self, config: MoesaicConfig, index: int) -> None:
        super().__init__()
        dim = config.hidden_size
        self.index = index
        self.attention_norm = Norm(dim, config.norm, config.norm_eps, scale=config.norm_scale)
        self.attention = Attention(
            dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            norm=config.norm,
            eps=config.norm_eps,
            scale=config.attention_scale,
        )
        self.mlp_norm = Norm(dim, config.norm, config.norm_eps, scale=config.norm_scale)
        assert config.mlp_layer_types is not None
        self.mlp = build_moe(config, index) if config.mlp_layer_types[index] == "moe" else dense_mlp(config)
        if config.zero_init_outputs:
            shared = self.mlp.shared if isinstance(self.mlp, MoE) else self.mlp
            for linear in (self.attention.o_proj, getattr(shared, "down", None)):
                if linear is not None:
                    setattr(linear, STARTS_AT_ZERO, True)
        self.attention_shift = CausalShift(dim, config.shift) if config.shift else None
        self.mlp_shift = CausalShift(dim, config.shift) if config.shift else None

    def forward(
        self, x_BSD: Tensor, call: BlockCall, cache: Any | None = None, history: History | None = None
    ) -> tuple[Tensor, Routing | None]:
        """(B, S, D) -> (B, S, D), and the routing of an MoE layer."""
        extend = None
        if cache is not None:

            def extend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                kept: tuple[Tensor, Tensor] = cache.update(k, v, self.index)
                return kept

        h = self._shift(self.attention_shift, self.attention_norm(x_BSD), call, history)
        x_BSD = x_BSD + self.attention(h, call.rotary, call.attend, call.mask, extend, **call.options)
        h = self._shift(self.mlp_shift, self.mlp_norm(x_BSD), call, history)
        if isinstance(self.mlp, MoE):
            y, routing = self.mlp(h, call.context)
            return x_BSD + y, routing
        return x_BSD + self.mlp(h), None

    @staticmethod
    def _shift(shift: CausalShift | None, h_BSD: Tensor, call: BlockCall, history: History | None) -> Tensor:
        if shift is None:
            return h_BSD
        if call.real_BS1 is not None:
            h_BSD = h_BSD * call.real_BS1
        mixed: Tensor = shift(h_BSD, None if history is None else history.extend(h_BSD))
        return mixed


def build_moe(config: MoesaicConfig, index: int) -> MoE:
    """The MoE layer that a configuration describes.

    Raises:
        ValueError: an unknown name or argument, parts that do not fit, a router that would show a causal model its
            future.
    """
    assert config.router is not None and config.experts is not None and config.losses is not None
    given = {"dim": config.hidden_size, "num_experts": config.num_experts}
    bank_routes = config.router.get("name") == BANK_ROUTES
    router = None if bank_routes else build(ROUTERS, "router", config.router, **given)
    zero = {"zero_down": config.zero_init_outputs, "activation": config.activation}
    bank = build(EXPERTS, "experts", config.experts, **given, width=config.expert_width, **zero)
    for part in (router, *bank.modules()):
        if isinstance(part, Router):
            part.check_causal()
            part.layer_name = f"model.layers.{index}.mlp"
            part.layer_index = index
    shared = None
    if config.shared is not None:
        spec = {"name": "ffn", **config.shared}
        shared = build(SHARED, "shared", spec, dim=config.hidden_size, width=config.expert_width, **zero)
    losses = [build(LOSSES, "loss", spec) for spec in config.losses]
    return MoE(bank, router, shared, losses)


def dense_mlp(config: MoesaicConfig) -> SharedExpert:
    """The feed-forward of a dense layer."""
    return SharedExpert(
        config.hidden_size, config.intermediate_size, config.activation, zero_down=config.zero_init_outputs
    )
