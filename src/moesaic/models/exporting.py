"""Export of the reference model into the native layouts that stock transformers, and what reads them, opens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moesaic.experts import FFNExperts, SharedExpert
from moesaic.formats.atomic import atomic_folder
from moesaic.layers import MoE
from moesaic.models.block import MoesaicBlock
from moesaic.models.modeling import MoesaicForCausalLM
from moesaic.routing import TopKRouter


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: the folder.
        family: the layout.
        layers: layers, dense ones included.
        experts: experts over all layers.
        tensors: parameters of the native model.
        bytes: their size.
    """

    path: Path
    family: str
    layers: int
    experts: int
    tensors: int
    bytes: int


@dataclass(frozen=True)
class _Family:
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    qk_norm: bool | str  # which norm of queries and keys the layout has
    renormalize: bool | None  # the one rule for weights, None where the configuration says it
    dense_layers: bool
    any_head_dim: bool
    sizes: Callable[[FFNExperts, TopKRouter, int], dict[str, Any]]


FAMILIES: dict[str, _Family] = {
    "qwen3_moe": _Family(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        True,
        None,
        True,
        True,
        lambda bank, router, dense: {
            "num_experts": bank.num_experts,
            "moe_intermediate_size": bank.width,
            "intermediate_size": dense,
            "norm_topk_prob": router.renormalize,
        },
    ),
    "olmoe": _Family(
        OlmoeConfig,
        OlmoeForCausalLM,
        "full",
        None,
        False,
        False,
        lambda bank, router, _: {
            "num_experts": bank.num_experts,
            "intermediate_size": bank.width,
            "norm_topk_prob": router.renormalize,
        },
    ),
    "mixtral": _Family(
        MixtralConfig,
        MixtralForCausalLM,
        False,
        True,
        False,
        True,
        lambda bank, _, __: {"num_local_experts": bank.num_experts, "intermediate_size": bank.width},
    ),
}


def export(model: MoesaicForCausalLM, family: str, path: str | os.PathLike[str]) -> Exported:
    """Write ``model`` as a checkpoint of ``family``, which stock transformers opens with equal logits.

    In float32 the logits are equal within rounding. The families' own routers multiply in the model's dtype and not in
    float32, so in bf16 some tokens choose other experts there than here.

    Args:
        model: a model of ours.
        family: ``"qwen3_moe"``, ``"olmoe"`` or ``"mixtral"``.
        path: folder to make; it must not exist.

    Returns:
        What was written.

    Raises:
        TypeError: another kind of model.
        ValueError: an unknown family; something that the family cannot express, every reason named; nothing is written.
        FileExistsError: ``path`` exists.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {sorted(FAMILIES)}, got {family!r}")
    if not isinstance(model, MoesaicForCausalLM):
        raise TypeError(f"model must be a MoesaicForCausalLM, got {type(model).__name__}")
    target = FAMILIES[family]
    reasons = refusals(model, family)
    if reasons:
        raise ValueError(f"{family} cannot express this model: {'; '.join(reasons)}")
    with torch.device("meta"):
        native = target.model(_native_config(model, target))
    tensors = _native_tensors(model)
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    native.load_state_dict(tensors, strict=True, assign=True)
    native.tie_weights()
    with atomic_folder(path) as folder:
        native.save_pretrained(folder)
    banks = [block.mlp.experts for block in _blocks(model) if isinstance(block.mlp, MoE)]
    parameters = list(native.parameters())
    return Exported(
        Path(path),
        family,
        len(_blocks(model)),
        sum(bank.num_experts for bank in banks),
        len(parameters),
        sum(value.numel() * value.element_size() for value in parameters),
    )


def refusals(model: MoesaicForCausalLM, family: str) -> list[str]:
    """What ``family`` cannot express of ``model``, one reason each; empty when it can be exported.

    Args:
        model: a model of ours.
        family: a name in ``FAMILIES``.
    """
    target, config, blocks = FAMILIES[family], model.config, _blocks(model)
    reasons = []
    if config.norm != "rms":
        reasons.append(f"its norms are RMS, the model's are {config.norm!r}")
    if config.ngram is not None:
        reasons.append("it has no n-gram embeddings")
    if config.shift:
        reasons.append("it has no shift before its sublayers")
    if config.logit_cap is not None:
        reasons.append("it has no logit cap")
    if _qk_norm(config.qk_norm) != _qk_norm(target.qk_norm):
        kinds = {"none": "no norm", "head": "a norm per head", "full": "one norm over all heads"}
        theirs, ours = kinds[_qk_norm(target.qk_norm)], kinds[_qk_norm(config.qk_norm)]
        reasons.append(f"its queries and keys have {theirs}, the model's {ours} (qk_norm={config.qk_norm!r})")
    attention = blocks[0].attention
    if not target.any_head_dim and attention.head_dim * attention.num_heads != config.hidden_size:
        reasons.append(f"its heads fill the model width, the model has {attention.num_heads} of {attention.head_dim}")
    moes = [(index, block.mlp) for index, block in enumerate(blocks) if isinstance(block.mlp, MoE)]
    if not moes:
        return [*reasons, "the model has no MoE layer"]
    dense = [index for index, block in enumerate(blocks) if not isinstance(block.mlp, MoE)]
    if dense and not target.dense_layers:
        reasons.append(f"all its layers are MoE, the model's layers {dense} are dense")
    if dense and config.activation != "swiglu":
        reasons.append(f"its dense layers are swiglu, the model's {config.activation!r}")
    for index, moe in moes:
        reasons += [f"layer {index}: {reason}" for reason in _layer_refusals(moe, moes[0][1], target)]
    return reasons


def _layer_refusals(moe: MoE, first: MoE, target: _Family) -> list[str]:
    router, bank, reasons = moe.router, moe.experts, []
    if type(router) is not TopKRouter:
        reasons.append(f"its router is softmax top-k, the model's {type(router).__name__}")
    else:
        if router.score_function != "softmax":
            reasons.append(f"its router scores by softmax, the model's by {router.score_function}")
        if router.has_bias:
            reasons.append("it has no selection bias")
        if router.num_groups > 1:
            reasons.append(f"it has no groups of experts, the model has {router.num_groups}")
        if router.scale != 1:
            reasons.append(f"it has no scale on the weights, the model's is {router.scale}")
        if target.renormalize is not None and router.renormalize != target.renormalize:
            reasons.append(f"it always renormalises the weights, the model has renormalize={router.renormalize}")
        if isinstance(first.router, TopKRouter) and router.top_k != first.router.top_k:
            reasons.append(f"all its layers have one top_k, the model {first.router.top_k} and {router.top_k}")
    if type(bank) is not FFNExperts:
        reasons.append(f"its experts are feed-forward networks, the model's {type(bank).__name__}")
    else:
        if bank.activation.name != "swiglu":
            reasons.append(f"its experts are swiglu, the model's {bank.activation.name}")
        if bank.up_bias_EF is not None:
            reasons.append("its experts have no biases")
        if bank.widths is not None and len(set(bank.widths)) > 1:
            reasons.append(f"its experts have one width, the model's {sorted(set(bank.widths))}")
        if isinstance(first.experts, FFNExperts) and (bank.num_experts, bank.width) != (
            first.experts.num_experts,
            first.experts.width,
        ):
            reasons.append("all its layers have the same experts, this one has another number or width than the first")
    if moe.shared is not None:
        reasons.append("it has no shared expert")
    return reasons


def _native_config(model: MoesaicForCausalLM, target: _Family) -> PreTrainedConfig:
    config, blocks = model.config, _blocks(model)
    moe = next(block.mlp for block in blocks if isinstance(block.mlp, MoE))
    assert isinstance(moe.experts, FFNExperts)
    assert isinstance(moe.router, TopKRouter)
    attention = blocks[0].attention
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads // attention.num_key_value_groups,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_experts_per_tok": moe.router.top_k,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "dtype": model.dtype,
        **target.sizes(moe.experts, moe.router, config.intermediate_size),
    }
    if target.any_head_dim:
        options["head_dim"] = attention.head_dim
    if target.dense_layers:
        options["mlp_only_layers"] = [i for i, block in enumerate(blocks) if not isinstance(block.mlp, MoE)]
    native: PreTrainedConfig = target.config(**options)
    return native


def _native_tensors(model: MoesaicForCausalLM) -> dict[str, Tensor]:
    """Tensors under the names of transformers' modules; the three families agree on them."""
    tensors = {
        "model.embed_tokens.weight": model.model.embed_tokens.weight,
        "model.norm.weight": _gain(model.model.norm, model),
        "lm_head.weight": model.lm_head.weight,
    }
    for index, block in enumerate(_blocks(model)):
        at, attention = f"model.layers.{index}", block.attention
        tensors[f"{at}.input_layernorm.weight"] = _gain(block.attention_norm, model)
        tensors[f"{at}.post_attention_layernorm.weight"] = _gain(block.mlp_norm, model)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = getattr(attention, name).weight
        # The families divide scores by sqrt(head_dim); what the model does beyond that goes into the queries.
        factor = attention.scaling * attention.head_dim**0.5
        if attention.q_norm is not None and attention.k_norm is not None:
            tensors[f"{at}.self_attn.q_norm.weight"] = _gain(attention.q_norm, model) * factor
            tensors[f"{at}.self_attn.k_norm.weight"] = _gain(attention.k_norm, model)
        else:
            tensors[f"{at}.self_attn.q_proj.weight"] = attention.q_proj.weight * factor
        if isinstance(block.mlp, MoE):
            assert block.mlp.router is not None
            weights = block.mlp.experts.weights()
            tensors[f"{at}.mlp.gate.weight"] = block.mlp.router.weight_ED.to(model.dtype)
            tensors[f"{at}.mlp.experts.gate_up_proj"] = torch.cat([weights["gate"], weights["up"]], 1)
            tensors[f"{at}.mlp.experts.down_proj"] = weights["down"]
        else:
            assert isinstance(block.mlp, SharedExpert)
            assert block.mlp.gate is not None
            for name in ("gate", "up", "down"):
                tensors[f"{at}.mlp.{name}_proj.weight"] = getattr(block.mlp, name).weight
    return {name: value.detach().contiguous() for name, value in tensors.items()}


def _gain(norm: Any, model: MoesaicForCausalLM) -> Tensor:
    """The learned factor of a norm; ones where it has none."""
    if norm.weight is not None:
        gain: Tensor = norm.weight
        return gain
    return torch.ones(norm.dim, dtype=model.dtype, device=model.device)


def _blocks(model: MoesaicForCausalLM) -> list[MoesaicBlock]:
    return [block for block in model.model.layers if isinstance(block, MoesaicBlock)]


def _qk_norm(kind: bool | str) -> str:
    return "none" if kind is False else "head" if kind is True else kind
