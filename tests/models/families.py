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
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 24,
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
    "sliding_window_size": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "global_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "unpadded_vocab_size": VOCABULARY,
}
_LATENT = {"num_key_value_heads": 4}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_LAST_TWO = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_GEMMA = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
_INKLING = {"d_rel": 4, "rel_extent": 16}


def _rope(*sections: int) -> dict[str, Any]:
    """Rotary positions in sections (of a text model that also sees pictures)."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model class, what its configuration changes, and what a handle must find.

    Args:
        model: class name.
        changes: settings beside the common ones.
        layers: MoE layers.
        score: name of the score function.
        choices: what a row can choose from.
        top_k: experts a row takes.
        runs: calls of MoE layers in one pass, when that is not one a layer.
        restricts: whether the model's own selection can be restricted.
        fast: whether its experts can run by our backends.
        slots: most experts a row may be given; None for any number.
        encoder_decoder: whether it reads two sequences.
        refused: why it cannot be opened at all.
    """

    model: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 3
    score: str = "softmax"
    choices: int = EXPERTS
    top_k: int = TOP_K
    runs: int | None = None
    restricts: bool = True
    fast: bool = True
    slots: int | None = None
    encoder_decoder: bool = False
    refused: str = ""
    chooses: bool = True

    @property
    def calls(self) -> int:
        """Calls of MoE layers in one pass."""
        return self.layers if self.runs is None else self.runs


def _sigmoid(model: str, changes: dict[str, Any] | None = None, layers: int = 2, **more: Any) -> Family:
    return Family(model, changes or {}, layers, score="sigmoid", **more)


ALL_FAMILIES = {
    # softmax over experts
    "mixtral": Family("MixtralForCausalLM"),
    "minimax": Family("MiniMaxForCausalLM"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {"mlp_only_layers": [0]}, layers=2),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_moe_raw": Family("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "qwen3_next": Family("Qwen3NextForCausalLM", _MIXED),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", _MIXED),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel", _rope(2, 1, 1)),
    "qwen3_omni_moe": Family("Qwen3OmniMoeThinkerTextModel", _rope(2, 1, 1)),
    "qwen4_exp": Family("Qwen4ExpForCausalLM"),
    "olmoe": Family("OlmoeForCausalLM"),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "mellum": Family("MellumForCausalLM"),
    "lara_mini": Family("LaraMiniForCausalLM"),
    "granitemoe": Family("GraniteMoeForCausalLM"),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM"),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", {**_MIXED, **_MAMBA}),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM"),
    "phimoe": Family("PhimoeForCausalLM", {"num_experts_per_tok": 2}, top_k=2, chooses=False),
    "cohere2_moe": _sigmoid("Cohere2MoeForCausalLM", {"expert_selection_fn": "sigmoid", "first_k_dense_replace": 1}),
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
    "deepseek_v3": _sigmoid("DeepseekV3ForCausalLM", _LATENT),
    "deepseek_v3_raw": _sigmoid("DeepseekV3ForCausalLM", {**_LATENT, "norm_topk_prob": False}),
    "deepseek_v32": _sigmoid("DeepseekV32ForCausalLM", _LATENT),
    "glm4_moe": _sigmoid("Glm4MoeForCausalLM"),
    "glm4_moe_lite": _sigmoid("Glm4MoeLiteForCausalLM", _LATENT),
    "glm4v_moe": _sigmoid("Glm4vMoeTextModel", _rope(1, 1, 0)),
    "glm_moe_dsa": _sigmoid("GlmMoeDsaForCausalLM", _LATENT),
    "glm5_next": _sigmoid("Glm5NextTextModel", {**_LATENT, **_LAST_TWO, "index_kpool": 4, "qk_rope_head_dim": 0}),
    "dots1": _sigmoid("Dots1ForCausalLM"),
    "dots3_note": _sigmoid(
        "Dots3NoteForCausalLM", {**_LATENT, "head_dim": 12, "layer_types": ["indexed_attention"] * 3}
    ),
    "exaone_moe": _sigmoid("ExaoneMoeForCausalLM"),
    "solar_open": _sigmoid("SolarOpenForCausalLM", layers=3),
    "mimo_v2_flash": _sigmoid("MiMoV2FlashForCausalLM"),
    "hy_v4": _sigmoid("HYV4ForCausalLM"),
    "hy_v4_vl": _sigmoid("HYV4VLTextModel", _rope(1, 1, 0)),
    "axk1": _sigmoid("AXK1ForCausalLM", _LATENT),
    "axk2": _sigmoid("AXK2ForCausalLM", _LATENT),
    "bailing_hybrid": _sigmoid("BailingHybridForCausalLM", {**_LATENT, **_MIXED}),
    "kimi_linear": _sigmoid("KimiLinearForCausalLM", {**_LATENT, **_MIXED}),
    "beam": _sigmoid("BeamForCausalLM", _LAST_TWO),
    "nemotron_h": _sigmoid(
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_latent_size": 20,
            "use_mamba_kernels": False,
        },
    ),
    # softmax inside groups
    "deepseek_v2": Family("DeepseekV2ForCausalLM", {**_LATENT, "topk_method": "group_limited_greedy"}, layers=2),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", {"n_group": None, "topk_group": None, **_LAST_TWO}, layers=2),
    "unlimited_ocr": Family("UnlimitedOcrTextModel", {"n_group": 1, "topk_group": 1}, layers=2),
    "mistral4": Family("Mistral4ForCausalLM", _LATENT, layers=2),
    "mistral_large4": Family("MistralLarge4TextModel", _LATENT, layers=2),
    # sigmoid and its like, no groups
    "minimax_m2": _sigmoid("MiniMaxM2ForCausalLM", layers=3),
    "minimax_m3_vl": _sigmoid("MiniMaxM3VLTextModel", _LAST_TWO),
    "hy_v3": _sigmoid("HYV3ForCausalLM"),
    "afmoe": _sigmoid("AfmoeForCausalLM", {"num_dense_layers": 1}),
    "lfm2_moe": _sigmoid(
        "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    ),
    "laguna": _sigmoid("LagunaForCausalLM"),
    "kolibri1": _sigmoid("Kolibri1ForCausalLM", layers=3),
    "flint": _sigmoid("FlintForCausalLM", {"mlp_only_layers": [0]}),
    "step3p7": _sigmoid("Step3p7TextModel", _LAST_TWO),
    "muse_spark": _sigmoid("MuseSparkTextModel", {**_LAST_TWO, "moe_hidden_size": 20}),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        {
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
        },
        score="sqrt_softplus",
    ),
    "inkling": _sigmoid("InklingForCausalLM", {**_INKLING, **_LAST_TWO, "n_shared_experts": 2}),
    "inkling2": _sigmoid(
        "Inkling2ForCausalLM", {**_INKLING, "n_layers_per_attn_res_block": 2, "num_hidden_layers": 4}, layers=4
    ),
    "inkling2_loop": _sigmoid(
        "Inkling2LoopForCausalLM",
        {
            **_INKLING,
            "n_layers_per_attn_res_block": 1,
            "num_hidden_layers": 4,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        },
        layers=4,
        runs=6,
    ),
    # biased experts, a bank beside a dense MLP, two banks a layer
    "gpt_oss": Family("GptOssForCausalLM"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterForTokenClassification"),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            **_GEMMA,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
    ),
    "diffusion_gemma": Family("DiffusionGemmaEncoderTextModel", _GEMMA),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel", {**_rope(1, 1, 2), "moe_intermediate_size": [16, 12]}, layers=4, runs=2
    ),
    # other routers and other shapes
    "zaya": Family("ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 8}, top_k=1),
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
    ),
    "llama4": _sigmoid(
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 24, "interleave_moe_layer_step": 1, "attention_chunk_size": 8},
        layers=3,
    ),
    "jetmoe": Family("JetMoeForCausalLM", {"kv_channels": 8}, fast=False),
    "doge": Family("DogeForCausalLM", {"is_moe": True, "num_experts": 16}, choices=16, fast=False),
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
            "expert_capacity": 2,
        },
        layers=2,
        top_k=1,
        fast=False,
        slots=1,
        encoder_decoder=True,
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
        fast=False,
        encoder_decoder=True,
        refused="a mask",
    ),
}
# One or two of every structure; the others run with the slow tests.
FAMILIES = {
    name: ALL_FAMILIES[name]
    for name in [
        "mixtral",
        "minimax",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_moe_raw",
        "olmoe",
        "flex_olmo",
        "mellum",
        "granitemoe",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "phimoe",
        "cohere2_moe",
        "ernie4_5_moe",
        "aria",
        "jamba",
        "deepseek_v3",
        "deepseek_v3_raw",
        "glm4_moe",
        "glm4_moe_lite",
        "dots1",
        "exaone_moe",
        "solar_open",
        "mimo_v2_flash",
        "hy_v4",
        "axk1",
        "axk2",
        "beam",
        "deepseek_v2",
        "mistral4",
        "minimax_m2",
        "afmoe",
        "gpt_oss",
        "openai_privacy_filter",
        "gemma4",
    ]
}


def build(name: str, **changes: Any) -> nn.Module:
    """A seeded float32 model in eval mode."""
    family = ALL_FAMILIES[name]
    kind = _class(name, family.model)
    allowed = {field.name for field in dataclasses.fields(kind.config_class)}
    settings = {key: value for key, value in _SETTINGS.items() if key in allowed}
    torch.manual_seed(0)
    config = kind.config_class(**{**settings, **family.changes, **changes})
    config._experts_implementation = "eager"
    model: nn.Module = kind(config).eval()
    _sharpen(model)
    return model


def _class(name: str, model: str) -> Any:
    found = getattr(transformers, model, None)
    if found is not None:
        return found
    return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), model)


def run(model: nn.Module, ids_BS: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits without cache; the last hidden state of a model without a head."""
    ids_BS = token_ids() if ids_BS is None else ids_BS
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", ids_BS.flip(1))
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
        if name.endswith("tid2eid"):
            rows = torch.rand((value.shape[0], EXPERTS), generator=generator).argsort(1)
            value.copy_(rows[:, : value.shape[1]])
        if not value.dtype.is_floating_point or leave.search(name) or value.numel() < 2:
            continue
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() >= 2 and value.shape[0] > 1:
            sharp = re.search(r"(gate|router|classifier|router_gate)\.|router", name)
            value.copy_(noise * (2.0 if sharp else 1.0) / value.shape[-1] ** 0.5)
        elif name.endswith("balancing_biases"):
            value.copy_(noise * 0.2)
            value[-1] = 0.3  # some rows skip the experts
        elif "bias" in name:
            value.copy_(noise * 0.2)
        elif isinstance(value, nn.Parameter):
            value.add_(noise * 0.1)
