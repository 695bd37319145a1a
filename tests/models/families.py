"""Tiny random models of transformers' MoE families of the standard shell, with settings that make every detail matter.

Groups, correction biases, scale factors and three experts a token, so that a forgotten detail moves the logits.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn

EXPERTS, TOP_K, GROUPS = 8, 3, 4
VOCABULARY = 64

_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_group": GROUPS,
    "num_expert_group": GROUPS,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
}
_LATENT = {"num_key_value_heads": 4}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model class, what its configuration changes, and what a handle must find.

    Args:
        model: class name.
        changes: of the configuration.
        layers: MoE layers.
        score: how its logits become probabilities.
        top_k: experts a row takes.
        choices: what a row can choose from; more than the experts where some return their input.
        experts: E.
        form: how router and experts speak: ``"stacked"``, or a form of the family's own.
        gone: experts that can be dropped together from a model without groups.
        order: a new order of the experts that changes nothing; None for backwards.
        alone: index of the last layer whose experts can be run outside the model.
    """

    model: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 3
    score: str = "softmax"
    top_k: int = TOP_K
    choices: int = EXPERTS
    experts: int = EXPERTS
    form: str = "stacked"
    gone: tuple[int, ...] = (1,)
    order: tuple[int, ...] | None = None
    alone: int = -1


FAMILIES = {
    # softmax over experts
    "mixtral": Family("MixtralForCausalLM"),
    "minimax": Family("MiniMaxForCausalLM"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}, layers=2),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_moe_raw": Family("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "olmoe": Family("OlmoeForCausalLM"),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "mellum": Family("MellumForCausalLM"),
    "granitemoe": Family("GraniteMoeForCausalLM"),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM"),
    "phimoe": Family("PhimoeForCausalLM", {"num_experts_per_tok": 2, "router_jitter_noise": 0.2}, top_k=2),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        {"expert_selection_fn": "sigmoid", "first_k_dense_replace": 1},
        layers=2,
        score="sigmoid",
    ),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", layers=2),
    "aria": Family("AriaTextForCausalLM"),
    "jamba": Family(
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
        layers=2,
    ),
    # sigmoid with correction bias and groups
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _LATENT, layers=2, score="sigmoid"),
    "deepseek_v3_raw": Family("DeepseekV3ForCausalLM", {**_LATENT, "norm_topk_prob": False}, layers=2, score="sigmoid"),
    "glm4_moe": Family("Glm4MoeForCausalLM", layers=2, score="sigmoid"),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", _LATENT, layers=2, score="sigmoid"),
    "dots1": Family("Dots1ForCausalLM", layers=2, score="sigmoid"),
    "exaone_moe": Family("ExaoneMoeForCausalLM", layers=2, score="sigmoid"),
    "solar_open": Family("SolarOpenForCausalLM", score="sigmoid"),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", layers=2, score="sigmoid"),
    "hy_v4": Family("HYV4ForCausalLM", layers=2, score="sigmoid"),
    "axk1": Family("AXK1ForCausalLM", _LATENT, layers=2, score="sigmoid"),
    "axk2": Family("AXK2ForCausalLM", _LATENT, layers=2, score="sigmoid"),
    "beam": Family("BeamForCausalLM", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, layers=2, score="sigmoid"),
    # softmax inside groups
    "deepseek_v2": Family("DeepseekV2ForCausalLM", {**_LATENT, "topk_method": "group_limited_greedy"}, layers=2),
    "mistral4": Family("Mistral4ForCausalLM", _LATENT, layers=2),
    # bias beside the router, biased and transposed experts, a bank beside a dense MLP
    "minimax_m2": Family("MiniMaxM2ForCausalLM", score="sigmoid"),
    "afmoe": Family("AfmoeForCausalLM", {"num_dense_layers": 1}, layers=2, score="sigmoid"),
    "gpt_oss": Family("GptOssForCausalLM"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterForTokenClassification"),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "top_k_experts": TOP_K,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    # shared experts in the sum of the weights; banks outside transformers' experts interface; identity experts
    "inkling": Family(
        "InklingForCausalLM",
        {
            "n_shared_experts": 2,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 8,
            "d_rel": 4,
            "rel_extent": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        layers=2,
        score="sigmoid",
    ),
    "step3p7": Family(
        "Step3p7TextModel", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, layers=2, score="sigmoid"
    ),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        {
            "num_layers": 2,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 16,
            "zero_expert_num": 4,
            "head_dim": 4,
        },
        layers=2,
        choices=EXPERTS + 4,
    ),
    # choice and weights in forms of their own
    "dbrx": Family(
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 16,
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
                "moe_normalize_expert_weights": 2.0,
            },
        },
        form="block selects",
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 24, "interleave_moe_layer_step": 1, "attention_chunk_size": 8},
        score="sigmoid",
        form="dense scores",
    ),
    "jetmoe": Family(
        "JetMoeForCausalLM", {"kv_channels": 8, "num_key_value_heads": 2}, layers=6, form="sorted rows", alone=-2
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "decoder_start_token_id": 0,
            "expert_capacity": 3,
        },
        layers=2,
        top_k=1,
        form="one-hot slots",
    ),
    "nllb_moe": Family(
        "NllbMoeForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "moe_token_dropout": 0.0,
            "decoder_start_token_id": 2,
        },
        layers=2,
        top_k=2,
        form="two masks",
        order=(0, 1, 7, 6, 5, 4, 3, 2),
    ),
    "doge": Family(
        "DogeForCausalLM",
        {"is_moe": True, "num_experts": 16},
        choices=16,
        experts=16,
        form="product keys",
        gone=(1, 4, 5, 6, 7, 9, 13),
        order=tuple(4 * first + second for first in (2, 0, 3, 1) for second in (2, 0, 3, 1)),
    ),
}


def build(name: str, **changes: Any) -> nn.Module:
    """A seeded float32 model in eval mode."""
    return create(name, FAMILIES[name], **changes)


@torch.no_grad()
def create(name: str, family: Family, **changes: Any) -> nn.Module:
    """A seeded float32 model of any family in eval mode.

    Args:
        name: of its folder in transformers, for classes that are not exported.
        family: how to build it.
        **changes: of the configuration.
    """
    kind = getattr(transformers, family.model, None)
    if kind is None:
        kind = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), family.model)
    allowed = {field.name for field in dataclasses.fields(kind.config_class)}
    settings = {key: value for key, value in _SETTINGS.items() if key in allowed}
    own = {
        key: value for key, value in {**family.changes, **changes}.items() if key in allowed or key in family.changes
    }
    torch.manual_seed(0)
    config = kind.config_class(**{**settings, **own})
    config._experts_implementation = "eager"
    model: nn.Module = kind(config).eval()
    _sharpen(model)
    for key, table in model.named_buffers():
        if key.endswith("balancing_biases"):  # zaya sets the entry of its skip class whatever the file says
            table[-1] = -1.0
        if key.endswith("tid2eid"):  # experts of each token; initially one and the same
            table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % family.experts)
    return model


def run(model: nn.Module, ids_BS: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits without cache; the last hidden state of a model without a head."""
    ids_BS = token_ids() if ids_BS is None else ids_BS
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", token_ids(*ids_BS.shape, seed=2))
    output = model(input_ids=ids_BS, use_cache=False, **inputs)
    logits: Tensor | None = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def token_ids(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Weights of unit gain, routers sharper, biases and scales off their defaults: initial values hide most errors."""
    generator = torch.Generator().manual_seed(0)
    leave = re.compile(r"A_log|dt_bias|conv1d|\.D$|freq|embed_positions")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if not value.dtype.is_floating_point or leave.search(name) or value.numel() < 2:
            continue
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() >= 2 and value.shape[0] > 1:
            value.copy_(noise * (2.0 if re.search(r"gate\.|router", name) else 1.0) / value.shape[-1] ** 0.5)
        elif "bias" in name:
            value.copy_(noise * 0.2)
        elif isinstance(value, nn.Parameter):
            value.add_(noise * 0.1)
