"""Configuration of the reference language model."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from moesaic.formats.arguments import check_count
from moesaic.models.registration import register_when_loaded

FORMAT = 1  # of the configuration and checkpoint; newer ones are refused


@strict
class MoesaicConfig(PreTrainedConfig):
    """A decoder whose layers are dense or MoE, with parts chosen by name.

    Args:
        vocab_size: V.
        hidden_size: D.
        num_hidden_layers: L.
        num_attention_heads: H.
        num_key_value_heads: key-value heads; H by default.
        head_dim: width of a head; D / H by default.
        intermediate_size: hidden width of dense feed-forward layers.
        activation: of dense feed-forward layers, and of experts and shared experts that name none.
        mlp_layer_types: ``"dense"`` or ``"moe"`` for each layer; all ``"moe"`` by default.
        num_experts: E.
        expert_width: F, hidden width of each expert.
        router: ``{"name": ..., arguments}``, see :data:`moesaic.models.parts.ROUTERS`.
        experts: the same for the bank.
        shared: the same for the shared expert, with its ``width``; None for none.
        losses: a list of the same for losses.
        norm: ``"rms"`` or ``"layer"`` (no bias).
        norm_scale: whether norms before sublayers have a learned factor.
        norm_eps: of norms.
        qk_norm: normalise queries and keys: True for each head, ``"full"`` for all heads together, False for neither.
        attention_scale: factor on attention scores; 1 / sqrt(head_dim) by default.
        rope_theta: base of rotary positions.
        ngram: ``{"orders": [2, 3], "rows": R}`` adds hashed n-gram embeddings at the input, with ``"min_count": c``
            those of a vocabulary that ``moesaic train`` learns from the text; None for none.
        shift: places of the causal depth-wise convolution before attention and feed-forward, 0 for none.
        zero_init_outputs: start every projection into the residual stream, and an untied head, at zero.
        embedding_std: standard deviation of token embeddings.
        logit_cap: soft cap c on logits, c tanh(x / c); None for none.
        tie_word_embeddings: the head is the embedding.
        max_position_embeddings: longest sequence meant; nothing is stored for it.
        output_routings: return routings by default.
        moesaic_format: version of this configuration's format.

    Raises:
        ValueError: sizes or names that do not fit, a format newer than this library's.
    """

    model_type = "moesaic"

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 512
    activation: str = "swiglu"
    mlp_layer_types: list[str] | None = None
    num_experts: int = 8
    expert_width: int = 256
    router: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    shared: dict[str, Any] | None = None
    losses: list[dict[str, Any]] | None = None
    norm: str = "rms"
    norm_scale: bool = True
    norm_eps: float = 1e-6
    qk_norm: bool | str = True
    attention_scale: float | None = None
    rope_theta: float = 10000.0
    ngram: dict[str, Any] | None = None
    shift: int = 0
    zero_init_outputs: bool = False
    embedding_std: float = 0.02
    logit_cap: float | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    use_cache: bool = True
    output_routings: bool = False
    moesaic_format: int = FORMAT
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.moesaic_format > FORMAT:
            raise ValueError(
                f"moesaic_format is {self.moesaic_format}, this moesaic reads up to {FORMAT}: install a newer moesaic"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "num_experts",
            "expert_width",
            "max_position_embeddings",
        ):
            check_count(name, getattr(self, name))
        for name in ("num_key_value_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("shift", self.shift, 0)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["moe"] * self.num_hidden_layers
        self.router = {"name": "top_k", "top_k": 2} if self.router is None else self.router
        self.experts = {"name": "ffn"} if self.experts is None else self.experts
        self.losses = [] if self.losses is None else self.losses
        kinds = self.mlp_layer_types
        if len(kinds) != self.num_hidden_layers or not set(kinds) <= {"dense", "moe"}:
            raise ValueError(
                f"mlp_layer_types must name 'dense' or 'moe' for each of the {self.num_hidden_layers} layers,"
                f" got {kinds}"
            )
        if self.logit_cap is not None and self.logit_cap <= 0:
            raise ValueError(f"logit_cap must be positive or None, got {self.logit_cap}")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


register_when_loaded()
