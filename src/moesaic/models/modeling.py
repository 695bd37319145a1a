"""The reference language model: a decoder of dense and MoE layers, as a transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import ModelOutput

from moesaic.layers.ngram import NgramEmbedding
from moesaic.layers.norm import Norm
from moesaic.layers.rotary import rotary_angles
from moesaic.layers.shift import CausalShift
from moesaic.models.block import STARTS_AT_ZERO, BlockCall, MoesaicBlock
from moesaic.models.configuration import MoesaicConfig
from moesaic.models.history import History
from moesaic.models.inputs import attention_pattern, eager_attention, is_packed, read_context
from moesaic.models.loading_report import check_loading
from moesaic.models.registration import register_when_loaded
from moesaic.routing import ParameterSpec, Routing, share_controllers

# What transformers' own callers add to a forward; everything else that is unknown is refused, not swallowed.
_IGNORED = {"return_dict", "output_attentions", "output_router_logits"}
_FOR_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal"}


@dataclass
class MoesaicOutput(ModelOutput):
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


class MoesaicPreTrainedModel(PreTrainedModel):
    """What both models share: initialisation and what transformers asks of a model."""

    config_class = MoesaicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoesaicBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Routers select and weigh in float32 whatever the model's dtype; controllers move in small steps.
    _keep_in_fp32_modules_strict = {"router", "threshold_controllers"}  # noqa: RUF012
    config: MoesaicConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: str | os.PathLike[str], *args: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As in transformers, except that a tensor that is missing, left over or of another shape is an error.

        Args:
            path: folder of a checkpoint.
            *args: as in transformers.
            output_loading_info: also return transformers' report.
            **options: as in transformers (``dtype``, ``device_map`` ...).

        Raises:
            ValueError: tensors that do not fit, named.
        """
        options["ignore_mismatched_sizes"] = True  # reported below, by name
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **options)
        model, report = loaded
        check_loading(str(path), report)
        _align(model)
        return (model, report) if output_loading_info else model

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the routings, which layers return"
                " beside their output: use the default, use_reentrant=False"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, every_n_layers)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0, config.embedding_std)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.0 if getattr(module, STARTS_AT_ZERO, False) else module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Norm):
            if module.weight is not None:
                module.weight.fill_(1.0)
        elif isinstance(module, NgramEmbedding):
            module.table_RD.zero_()
        elif isinstance(module, CausalShift):
            module.weight_JD.zero_()
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


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
        blocks = [MoesaicBlock(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        # A controller that serves many layers belongs to the model.
        share_controllers(self)
        self.norm = Norm(config.hidden_size, config.norm, config.norm_eps, scale=config.norm_scale)
        self.head_dim = blocks[0].attention.head_dim
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

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
        config = self.config
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
        context = read_context(
            attention_mask,
            position_ids,
            batch,
            length,
            past,
            training=self.training,
            device=x_BSD.device,
            condition=condition,
        )
        packed = is_packed(context, batch)
        if packed and (self.ngram is not None or config.shift):
            raise ValueError(
                "position_ids start again inside a row (packed sequences): n-gram embeddings and shift would look"
                " across the seam; give one sequence a row"
            )
        assert context.position_T is not None
        position_BS = context.position_T.view(batch, length)
        real_BS = None if context.token_mask_T is None else context.token_mask_T.view(batch, length)
        history = History(cache, config.num_hidden_layers)
        if self.ngram is not None:
            x_BSD = self._with_ngrams(x_BSD, input_ids, real_BS, history)
        plain = attention_mask is None and not past and not packed
        call = BlockCall(
            context,
            attention_pattern(config, x_BSD, attention_mask, position_BS, None if packed else cache, plain),
            None if real_BS is None else real_BS[..., None],
            rotary_angles(position_BS, self.head_dim, config.rope_theta),
            ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention),
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


class Head(nn.Linear):
    """The projection to the vocabulary."""

    parameter_axes: ClassVar[dict[str, ParameterSpec]] = {"weight": ParameterSpec(("vocab", "model"), "head")}


class MoesaicForCausalLM(MoesaicPreTrainedModel, GenerationMixin):
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
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        if config.zero_init_outputs and not config.tie_word_embeddings:
            setattr(self.lm_head, STARTS_AT_ZERO, True)
        self.post_init()  # type: ignore[no-untyped-call]

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The 2-D mask as it is, also for caches of fixed size: routers must know which tokens are padding."""
        return attention_mask

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
        num_items_in_batch: int | Tensor | None = None,
        **options: Any,
    ) -> MoesaicOutput:
        """Next-token logits.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S') 1 for real tokens, padding on either side; or a 4-D mask of who attends to whom.
            position_ids: (B, S); counted from the first real token by default.
            cache: keys and values of earlier calls.
            inputs_embeds: (B, S, D) instead of ids.
            labels: (B, S) ids to predict, position t from those before t; -100 and padding are left out.
            use_cache: return a cache; by default outside training.
            output_hidden_states: return hidden states.
            output_routings: return one Routing per MoE layer.
            logits_to_keep: only the last so many positions' logits (0 for all), or indices.
            condition: named tensors for routers and experts that need them.
            num_items_in_batch: targets of the whole optimizer step, by which the summed loss is divided under
                gradient accumulation; those of this call by default.
            **options: passed to the attention function.

        Raises:
            ValueError: inputs, masks, positions or labels that do not fit; an unknown argument.
        """
        _check_options(options)
        options = {name: value for name, value in options.items() if name in _FOR_ATTENTION}
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
        lm_loss = None
        if labels is not None:
            lm_loss = _cross_entropy(logits, _real_labels(labels, attention_mask), num_items_in_batch)
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


@torch.no_grad()
def _align(model: nn.Module) -> None:
    """Copy loaded tensors that lie at odd addresses of the mapped file.

    There kernels round otherwise than for those of a model that was just trained, and they would change with the file.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def _check_options(options: dict[str, Any]) -> None:
    if options.get("past_key_values") is not None:
        raise ValueError("past_key_values is called cache here, as in transformers from 5.24 on")
    unknown = sorted(set(options) - _IGNORED - _FOR_ATTENTION - {"past_key_values"})
    if unknown:
        raise ValueError(f"the model does not take {unknown}")


def _real_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Labels without those of padding, and without those that would be predicted from padding."""
    if attention_mask is None or attention_mask.dim() != 2 or attention_mask.shape[1] < labels.shape[1]:
        return labels
    real_BS = attention_mask[:, attention_mask.shape[1] - labels.shape[1] :] != 0
    return labels.masked_fill(~(real_BS & real_BS.roll(1, -1)), -100)  # the first label of a row predicts nothing


def _cross_entropy(logits: Tensor, labels: Tensor, items: int | Tensor | None) -> Tensor:
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels must have shape {tuple(logits.shape[:2])} like the logits, got {tuple(labels.shape)}")
    targets = labels[:, 1:].reshape(-1)
    rows = logits[:, :-1].flatten(0, 1)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    losses = F.cross_entropy(rows, targets, ignore_index=-100, reduction="sum")
    return losses / ((targets != -100).sum().clamp(min=1) if items is None else items)


register_when_loaded()
