"""The reference language model: a decoder of dense and MoE layers, as a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from moesaic.experts import SharedExpert
from moesaic.layers import MoE
from moesaic.layers.attention import Attention
from moesaic.layers.ngram import NgramEmbedding
from moesaic.layers.norm import Norm
from moesaic.layers.rotary import rotary_angles
from moesaic.layers.shift import CausalShift
from moesaic.models.configuration import MoesaicConfig
from moesaic.models.history import History
from moesaic.models.parts import EXPERTS, LOSSES, ROUTERS, SHARED, build
from moesaic.routing import Context, Routing


@dataclass
class MoesaicOutput(ModelOutput):  # type: ignore[misc]
    """What the model returns.

    Attributes:
        loss: ``lm_loss``, plus ``aux_loss`` in training mode; None without labels.
        lm_loss: mean cross-entropy in nats per target, without auxiliary losses; perplexity is its exponential.
        aux_loss: sum over layers of the routings' losses; None where there are none.
        logits: (B, S, V).
        cache: keys and values, when asked for.
        hidden_states: input of each layer and the final normalised state, when asked for.
        routings: one Routing per MoE layer, when asked for.
    """

    loss: Tensor | None = None
    lm_loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    routings: tuple[Routing, ...] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """What all layers of one forward share."""

    context: Context
    mask: Tensor | None
    real_BS1: Tensor | None
    rotary: tuple[Tensor, Tensor]
    attend: Callable[..., Any]
    options: dict[str, Any]


class MoesaicBlock(GradientCheckpointingLayer):  # type: ignore[misc]
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
        self.attention_shift = CausalShift(dim, config.shift) if config.shift else None
        self.mlp_shift = CausalShift(dim, config.shift) if config.shift else None

    def forward(
        self, x_BSD: Tensor, call: Call, cache: Any | None = None, history: History | None = None
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
    def _shift(shift: CausalShift | None, h_BSD: Tensor, call: Call, history: History | None) -> Tensor:
        if shift is None:
            return h_BSD
        if call.real_BS1 is not None:
            h_BSD = h_BSD * call.real_BS1
        mixed: Tensor = shift(h_BSD, None if history is None else history.extend(h_BSD))
        return mixed


def build_moe(config: MoesaicConfig, index: int) -> MoE:
    """The MoE layer that a configuration describes.

    Raises:
        ValueError: an unknown name or argument, parts that do not fit, a router that would show a causal model its future.
    """
    assert config.router is not None and config.experts is not None and config.losses is not None
    given = {"dim": config.hidden_size, "num_experts": config.num_experts}
    router = build(ROUTERS, "router", config.router, **given)
    router.check_causal()
    router.layer_name = f"model.layers.{index}.mlp"
    router.layer_index = index
    zero = {"zero_down": config.zero_init_outputs, "activation": config.activation}
    bank = build(EXPERTS, "experts", config.experts, **given, width=config.expert_width, **zero)
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


class MoesaicPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both models share: initialisation and what transformers asks of a model."""

    config_class = MoesaicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoesaicBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Routers select and weigh in float32 whatever the model's dtype.
    _keep_in_fp32_modules_strict = {"router"}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config: MoesaicConfig = self.config
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0, config.embedding_std)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Norm):
            if module.weight is not None:
                module.weight.fill_(1.0)
        elif isinstance(module, NgramEmbedding):
            module.table_RD.zero_()
        elif isinstance(module, CausalShift):
            module.weight_JD.zero_()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if config.zero_init_outputs:
            if isinstance(module, Attention):
                module.o_proj.weight.zero_()
            elif isinstance(module, SharedExpert):
                module.down.weight.zero_()


class MoesaicModel(MoesaicPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: MoesaicConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.ngram = NgramEmbedding(config.hidden_size, **config.ngram) if config.ngram is not None else None
        # With n-grams the sum of embeddings has no fixed size: it is normalised once.
        self.embed_norm = (
            None if self.ngram is None else Norm(config.hidden_size, config.norm, config.norm_eps, scale=False)
        )
        self.layers = nn.ModuleList(MoesaicBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.norm, config.norm_eps, scale=config.norm_scale)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        condition: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any | None, list[Tensor], list[Routing]]:
        """Final states (B, S, D), cache, hidden states (when asked for), routings."""
        config: MoesaicConfig = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if self.ngram is not None and input_ids is None:
            raise ValueError("inputs_embeds cannot be used with n-gram embeddings, which need input_ids")
        if input_ids is not None and (input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32)):
            raise ValueError(
                f"input_ids must be integers of shape (B, S), got {input_ids.dtype} {tuple(input_ids.shape)}"
            )
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        past = 0 if cache is None else int(cache.get_seq_length())
        x_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = x_BSD.shape[:2]
        context, position_BS = self._context(attention_mask, position_ids, batch, length, past, x_BSD.device, condition)
        real_BS = None if context.token_mask_T is None else context.token_mask_T.view(batch, length)
        history = History(cache, config.num_hidden_layers)
        if self.ngram is not None:
            x_BSD = self._with_ngrams(x_BSD, input_ids, real_BS, history)
        call = Call(
            context,
            self._mask(x_BSD, attention_mask, position_BS, cache),
            None if real_BS is None else real_BS[..., None],
            rotary_angles(position_BS, self.layers[0].attention.head_dim, config.rope_theta),
            ALL_ATTENTION_FUNCTIONS[config._attn_implementation] if config._attn_implementation != "eager" else eager,
            options,
        )
        states: list[Tensor] = []
        routings: list[Routing] = []
        for layer in self.layers:
            if output_hidden_states:
                states.append(x_BSD)
            x_BSD, routing = layer(x_BSD, call, cache=cache, history=history)
            if routing is not None:
                routings.append(routing)
        x_BSD = self.norm(x_BSD)
        if output_hidden_states:
            states.append(x_BSD)
        return x_BSD, cache, states, routings

    def _with_ngrams(self, x_BSD: Tensor, ids_BS: Tensor | None, real_BS: Tensor | None, history: History) -> Tensor:
        assert ids_BS is not None and self.ngram is not None and self.embed_norm is not None
        kept = (ids_BS if real_BS is None else torch.where(real_BS, ids_BS, -1)).to(torch.int64)
        past = history.extend(kept[..., None])
        extra = self.ngram(ids_BS.to(torch.int64), None if past is None else past[..., 0], real_BS)
        normed: Tensor = self.embed_norm(x_BSD + extra)
        return normed

    def _context(
        self,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        batch: int,
        length: int,
        past: int,
        device: torch.device,
        condition: dict[str, Tensor] | None,
    ) -> tuple[Context, Tensor]:
        if position_ids is None and past and attention_mask is None:
            position_ids = torch.arange(past, past + length, device=device)
        phase = "train" if self.training else "decode" if past else "prefill"
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if attention_mask is not None and attention_mask.dim() not in (2, 4):
            raise ValueError(
                "attention_mask must have shape (B, S), 1 for real tokens, or (B, 1, S, S') saying who attends to whom;"
                f" got {tuple(attention_mask.shape)}"
            )
        context = Context.from_mask(
            mask, batch, length, device=device, position_BS=position_ids, phase=phase, condition=condition
        )
        if context.token_mask_T is not None and bool(context.token_mask_T.all()):
            context = context.replace(token_mask_T=None)
        assert context.position_T is not None
        return context, context.position_T.view(batch, length)

    def _mask(
        self, x_BSD: Tensor, attention_mask: Tensor | None, position_BS: Tensor, cache: Any | None
    ) -> Tensor | None:
        if (
            attention_mask is None
            and (cache is None or not cache.get_seq_length())
            and self.config._attn_implementation == "sdpa"
        ):
            return None  # plain causal attention, which the kernel does without a mask
        mask: Tensor | None = create_causal_mask(
            config=self.config,
            inputs_embeds=x_BSD,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_BS,
        )
        return mask


def eager(
    module: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by plain operations, which returns its weights."""
    k, v = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores + mask if mask.dtype != torch.bool else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(q.dtype)
    return (weights @ v).transpose(1, 2), weights


class MoesaicForCausalLM(MoesaicPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The reference language model.

    A transformers model: ``from_pretrained``, ``save_pretrained``, ``generate``, gradient checkpointing; after
    ``import moesaic`` ``AutoModelForCausalLM`` opens it too.

    Args:
        config: see :class:`MoesaicConfig`.

    Raises:
        ValueError: a configuration whose parts do not fit.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MoesaicConfig) -> None:
        super().__init__(config)
        self.model = MoesaicModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.lm_head and self.config.zero_init_outputs and not self.config.tie_word_embeddings:
            module.weight.zero_()

    @property
    def parameter_axes(self) -> dict[str, Any]:
        """Roles are declared by the parts; the head's by its own module."""
        return {}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_routings: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        condition: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> MoesaicOutput:
        """Next-token logits.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S') 1 for real tokens, padding on either side; or a 4-D mask of who attends to whom.
            position_ids: (B, S); counted from the first real token by default.
            cache: keys and values of earlier calls.
            inputs_embeds: (B, S, D) instead of ids.
            labels: (B, S) ids to predict, position t from those before t; -100 is left out.
            use_cache: return a cache; by default outside training.
            output_hidden_states: return hidden states.
            output_routings: return one Routing per MoE layer.
            logits_to_keep: only the last so many positions' logits (0 for all), or indices.
            condition: named tensors for routers and experts that need them.
            **options: passed to the attention function.
        """
        options.pop("return_dict", None)
        options.pop("output_attentions", None)
        x_BSD, cache, states, routings = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            condition=condition,
            **options,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x_BSD[:, keep, :] if isinstance(keep, Tensor) or logits_to_keep else x_BSD)
        if self.config.logit_cap is not None:
            logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        terms = [value for routing in routings for value in routing.losses.values()]
        aux_loss = torch.stack(terms).sum() if terms else None
        lm_loss = None if labels is None else _cross_entropy(logits, labels)
        loss = lm_loss
        if lm_loss is not None and aux_loss is not None and self.training:
            loss = lm_loss + aux_loss
        wanted = self.config.output_routings if output_routings is None else output_routings
        return MoesaicOutput(
            loss=loss,
            lm_loss=lm_loss,
            aux_loss=aux_loss,
            logits=logits,
            cache=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
            routings=tuple(routings) if wanted else None,
        )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels must have shape {tuple(logits.shape[:2])} like the logits, got {tuple(labels.shape)}")
    targets = labels[:, 1:].reshape(-1)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return losses / (targets != -100).sum().clamp(min=1)
