"""Reading what a caller says about a batch: padding, positions, packing, and who attends to whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from moesaic.layers.attention import Attention
from moesaic.models.configuration import MoesaicConfig
from moesaic.routing import Context


def read_context(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    batch: int,
    length: int,
    past: int,
    *,
    training: bool,
    device: torch.device,
    condition: Mapping[str, Tensor] | None = None,
) -> Context:
    """The context of one call, rows flattened to T = B * S; its ``position_T`` is always set.

    Padding comes from a 2-D mask. Without a mask and a cache, positions that start again inside a row mark packed
    sequences, each of them a group of its own.

    Args:
        attention_mask: (B, past + S) bool or integer, nonzero for real tokens, on either side; a 4-D mask says nothing
            here; None for no padding.
        position_ids: (B, S) or (1, S); counted from the first real token of each row by default.
        batch: B.
        length: S, tokens of this call.
        past: tokens in the cache.
        training: whether the model is in training mode.
        device: where to build the fields.
        condition: named tensors.

    Raises:
        ValueError: a mask or positions of another shape or kind.
    """
    _check(attention_mask, position_ids, batch, length, past)
    mask_BS = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    given = position_ids is not None
    if position_ids is None and mask_BS is None:
        position_ids = torch.arange(past, past + length, device=device)
    context = Context.from_mask(
        mask_BS,
        batch,
        length,
        device=device,
        position_BS=position_ids,
        phase="train" if training else "decode" if past else "prefill",
        condition=condition,
    )
    if context.token_mask_T is not None and bool(context.token_mask_T.all()):
        context = context.replace(token_mask_T=None)
    if given and attention_mask is None and not past:
        assert context.position_T is not None
        starts_BS = torch.ones(batch, length, dtype=torch.bool, device=device)
        starts_BS[:, 1:] = context.position_T.view(batch, length).diff(dim=-1) != 1
        context = context.replace(group_T=starts_BS.flatten().cumsum(0) - 1)
    return context


def is_packed(context: Context, batch: int) -> bool:
    """Whether a row holds several sequences."""
    return context.group_T is not None and context.group_T.numel() > 0 and int(context.group_T[-1]) >= batch


def attention_pattern(
    config: MoesaicConfig,
    x_BSD: Tensor,
    attention_mask: Tensor | None,
    position_BS: Tensor,
    cache: Any | None,
    plain: bool,
) -> Tensor | None:
    """Who attends to whom, as the attention function wants it; None for causal attention that needs no mask.

    Args:
        config: of the model.
        x_BSD: embeddings.
        attention_mask: as the caller gave it.
        position_BS: positions.
        cache: keys and values of earlier calls.
        plain: nothing is padded, packed or cached.
    """
    if plain and config._attn_implementation == "sdpa":
        return None
    mask: Tensor | None = create_causal_mask(
        config=config, inputs_embeds=x_BSD, attention_mask=attention_mask, cache=cache, position_ids=position_BS
    )
    return mask


def eager_attention(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by plain operations, which also returns its weights (B, H, S, S')."""
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    wide = scores if scores.dtype == torch.float64 else scores.float()
    weights = torch.dropout(wide.softmax(-1).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def _check(attention_mask: Tensor | None, position_ids: Tensor | None, batch: int, length: int, past: int) -> None:
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if attention_mask.dim() == 2:
            if shape != (batch, past + length):
                raise ValueError(
                    f"attention_mask must have shape (B, past + S) = ({batch}, {past + length}), the cached tokens"
                    f" included, got {shape}"
                )
        elif attention_mask.dim() == 4:
            if attention_mask.dtype != torch.bool and not attention_mask.dtype.is_floating_point:
                raise ValueError(
                    "a 4-D attention_mask must be bool (True may be seen) or floating point (added to the scores), got"
                    f" {attention_mask.dtype}"
                )
            if shape[0] not in (1, batch) or shape[2] != length or shape[3] < past + length:
                raise ValueError(
                    f"a 4-D attention_mask must have shape (B, 1, S, past + S) = ({batch}, 1, {length},"
                    f" {past + length}), got {shape}"
                )
        else:
            raise ValueError(
                "attention_mask must have shape (B, S), 1 for real tokens, or (B, 1, S, S') saying who attends to whom;"
                f" got {shape}"
            )
    if position_ids is not None and (
        position_ids.dim() > 2
        or position_ids.shape[-1] != length
        or (position_ids.dim() == 2 and position_ids.shape[0] not in (1, batch))
    ):
        raise ValueError(
            f"position_ids must have shape (B, S) = ({batch}, {length}) or (1, S), got {tuple(position_ids.shape)}"
        )
