"""The other MoE families of transformers, for the table of families, each with the settings that its class needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.models.families import FAMILIES, TOP_K, VOCABULARY, Family

_LATENT = {"num_key_value_heads": 4}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
}
_INDEX = {**_LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_GEMMA: dict[str, Any] = {
    "top_k_experts": TOP_K,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_WINDOW: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
}


def _sections(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


MORE = {
    "qwen3_next": Family("Qwen3NextForCausalLM", _LINEAR),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", _LINEAR),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel", _sections(2, 1, 1)),
    "qwen3_omni_moe": Family("Qwen3OmniMoeThinkerTextModel", _sections(2, 1, 1)),
    "qwen4_exp": Family("Qwen4ExpForCausalLM", {"norm_topk_prob": True}),
    "lara_mini": Family("LaraMiniForCausalLM"),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", {**_LINEAR, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
    ),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM"),
    "mistral_large4": Family("MistralLarge4TextModel", _LATENT, layers=2),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", {"n_group": None, "topk_group": None, **_SPARSE}, layers=2),
    "unlimited_ocr": Family("UnlimitedOcrTextModel", {"n_group": 1}, layers=2),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", _INDEX, layers=2, score="sigmoid"),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", _INDEX, layers=2, score="sigmoid"),
    "glm4v_moe": Family("Glm4vMoeTextModel", _sections(1, 1, 0), layers=2, score="sigmoid"),
    "glm5_next": Family(
        "Glm5NextTextModel",
        {**_INDEX, **_LINEAR, **_SPARSE, "index_kpool": 4, "qk_rope_head_dim": 0, "linear_head_dim": 8},
        layers=2,
        score="sigmoid",
    ),
    "dots3_note": Family(
        "Dots3NoteForCausalLM",
        {
            **_INDEX,
            "head_dim": 12,
            "shared_experts_intermediate_size": 16,
            "layer_types": ["indexed_attention"] * 3,
        },
        layers=2,
        score="sigmoid",
    ),
    "hy_v4_vl": Family("HYV4VLTextModel", _sections(1, 1, 0), layers=2, score="sigmoid"),
    "bailing_hybrid": Family("BailingHybridForCausalLM", {**_LATENT, **_LINEAR}, layers=2, score="sigmoid"),
    "kimi_linear": Family(
        "KimiLinearForCausalLM", {**_LATENT, **_LINEAR, "linear_head_dim": 8}, layers=2, score="sigmoid"
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 16,
            "use_mamba_kernels": False,
        },
        layers=2,
        score="sigmoid",
    ),
    "minimax_m3_vl": Family(
        "MiniMaxM3VLTextModel", {**_SPARSE, "dense_intermediate_size": 24, **_INDEX}, layers=2, score="sigmoid"
    ),
    "hy_v3": Family("HYV3ForCausalLM", layers=2, score="sigmoid"),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        layers=2,
        score="sigmoid",
    ),
    "laguna": Family("LagunaForCausalLM", layers=2, score="sigmoid"),
    "kolibri1": Family("Kolibri1ForCausalLM", score="sigmoid"),
    "flint": Family("FlintForCausalLM", {"mlp_only_layers": [0]}, layers=2, score="sigmoid"),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        {
            "num_experts_per_tok": 2,
            "index_topk": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        },
        score="sqrt_softplus",
        top_k=2,
    ),
    "muse_spark": Family("MuseSparkTextModel", {"moe_hidden_size": 16, **_SPARSE}, layers=2, score="sigmoid"),
    "inkling2": Family(
        "Inkling2ForCausalLM", {**_WINDOW, "n_layers_per_attn_res_block": 2}, layers=4, score="sqrt_softplus"
    ),
    "inkling2_loop": Family(
        "Inkling2LoopForCausalLM",
        {
            **_WINDOW,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        },
        layers=4,
        score="sqrt_softplus",
    ),
    "diffusion_gemma": Family("DiffusionGemmaEncoderTextModel", _GEMMA),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel", {"moe_intermediate_size": [16, 12], **_sections(1, 1, 2)}, layers=4
    ),
    "kolibri1_1": Family(
        "Kolibri1_1ForCausalLM",
        {"head_dim": 16, "index_num_heads": 2, "layer_types": ["sliding_attention"] * 3, "mlp_only_layers": []},
        score="sigmoid",
    ),
    "minicpm5_moe": Family("MiniCPM5MoeForCausalLM", _SPARSE, layers=2, score="sigmoid"),
    "zaya": Family("ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 8}, top_k=1),
}
_INSTALLED = Path(transformers.__file__).parent / "models"
ALL = {
    name: family
    for name, family in {**FAMILIES, **MORE}.items()
    if not name.endswith("_raw") and (_INSTALLED / name).is_dir()
}

__all__ = ["ALL", "MORE"]
