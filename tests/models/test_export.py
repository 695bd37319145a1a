"""Export: stock transformers gives the same logits, or nothing is written and the reason is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moesaic.models import MoesaicForCausalLM, export, load
from tests.models.small import VOCABULARY, padded, small_model, tokens

# Per family a model that it can express.
FITTING: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"qk_norm": True},
    "olmoe": {"qk_norm": "full"},
    "mixtral": {"qk_norm": False},
}


def fitting(family: str, router: dict[str, Any] | None = None, **changes: Any) -> MoesaicForCausalLM:
    router = {"name": "top_k", "top_k": 2, "renormalize": True} if router is None else router
    model = small_model(router, **{**FITTING[family], **changes})
    with torch.no_grad():  # factors of norms at their start would hide one that goes astray
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model


@torch.no_grad()
def assert_same_logits(model: MoesaicForCausalLM, path: Path, **options: Any) -> None:
    native = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(native).__module__.startswith("transformers.")
    ids, mask = padded([tokens(1, length, length)[0] for length in (3, 9)], "right")
    for keywords in ({"input_ids": tokens(2, 11)}, {"input_ids": ids, "attention_mask": mask}):
        ours, theirs = model(**keywords).logits, native(**keywords).logits
        real = keywords.get("attention_mask", torch.ones_like(keywords["input_ids"])).bool()
        torch.testing.assert_close(theirs[real], ours[real], rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
    assert ours.std() > 0.1, "logits are all alike: the test shows nothing"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"router": {"name": "top_k", "top_k": 3, "renormalize": False}}),
        ("qwen3_moe", {"mlp_layer_types": ["dense", "moe"], "head_dim": 6, "rope_theta": 500.0}),
        ("qwen3_moe", {"tie_word_embeddings": True, "attention_scale": 0.3, "norm_eps": 1e-3}),
        ("olmoe", {}),
        ("olmoe", {"router": {"name": "top_k", "top_k": 1, "renormalize": False}, "num_key_value_heads": 4}),
        ("mixtral", {}),
        ("mixtral", {"attention_scale": 0.9, "norm_scale": False, "router": {"name": "top_k", "top_k": 3}}),
        ("qwen3_moe", {"router": {"name": "top_k", "top_k": 2, "noise_std": 0.5, "renormalize": True}}),
    ],
    ids=str,
)
def test_stock_transformers_gives_the_same_logits(family: str, changes: dict[str, Any], tmp_path: Path):
    model = fitting(family, **changes)
    written = export(model, family, tmp_path / "native")
    assert_same_logits(model, written.path)
    experts = {"dense": 0, "moe": model.config.num_experts}
    assert written.experts == sum(experts[kind] for kind in model.config.mlp_layer_types)
    assert written.tensors == len(list(load(written.path).parameters()))


def test_what_was_exported_generates_the_same(tmp_path: Path):
    model = fitting("qwen3_moe")
    native = load(export(model, "qwen3_moe", tmp_path / "native").path)
    prompt = tokens(1, 4)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": VOCABULARY + 1}
    mask = torch.ones_like(prompt)
    assert torch.equal(
        native.generate(prompt, attention_mask=mask, **options), model.generate(prompt, attention_mask=mask, **options)
    )


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3_moe", {"router": {"name": "relu", "target": 2.0}}, "ReLURouter"),
        ("qwen3_moe", {"router": {"name": "cosine", "top_k": 2}}, "CosineRouter"),
        ("olmoe", {"router": {"name": "top_k", "top_k": 2, "score": "sigmoid"}}, "sigmoid"),
        ("qwen3_moe", {"router": {"name": "top_k", "top_k": 2, "bias": True}}, "selection bias"),
        ("qwen3_moe", {"router": {"name": "top_k", "top_k": 2, "scale": 2.5}}, "scale on the weights.*2.5"),
        ("qwen3_moe", {"router": {"name": "top_k", "top_k": 2, "num_groups": 2, "top_groups": 1}}, "groups"),
        ("mixtral", {"router": {"name": "top_k", "top_k": 2, "renormalize": False}}, "always renormalises"),
        ("qwen3_moe", {"shared": {"width": 8}}, "shared expert"),
        ("qwen3_moe", {"experts": {"name": "ffn", "widths": [12, 8, 12, 4]}}, r"one width.*\[4, 8, 12\]"),
        ("mixtral", {"experts": {"name": "ffn", "bias": True}}, "no biases"),
        ("olmoe", {"experts": {"name": "ffn", "activation": "relu2"}}, "swiglu.*relu2"),
        ("qwen3_moe", {"mlp_layer_types": ["dense", "moe"], "activation": "gelu"}, "dense layers are swiglu"),
        ("qwen3_moe", {"norm": "layer"}, "RMS.*layer"),
        ("qwen3_moe", {"qk_norm": False}, "norm per head.*no norm"),
        ("olmoe", {"qk_norm": True}, "over all heads.*per head"),
        ("mixtral", {"qk_norm": True}, "no norm.*per head"),
        ("qwen3_moe", {"logit_cap": 15.0}, "logit cap"),
        ("qwen3_moe", {"ngram": {"orders": [2], "rows": 64}}, "n-gram"),
        ("qwen3_moe", {"shift": 1}, "shift"),
        ("mixtral", {"mlp_layer_types": ["dense", "moe"]}, r"layers \[0\] are dense"),
        ("olmoe", {"head_dim": 6}, "4 of 6"),
        ("qwen3_moe", {"mlp_layer_types": ["dense", "dense"]}, "no MoE layer"),
    ],
    ids=str,
)
def test_what_a_family_cannot_express_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=f"(?s){family} cannot express this model.*{reason}"):
        export(fitting(family, **changes), family, tmp_path / "native")
    assert not list(tmp_path.iterdir())


def test_every_reason_is_named_at_once(tmp_path: Path):
    model = fitting("mixtral", shared={"width": 8}, logit_cap=9.0, norm="layer")
    with pytest.raises(ValueError, match=r"(?s)RMS.*logit cap.*layer 0: it has no shared expert.*layer 1:"):
        export(model, "mixtral", tmp_path / "native")


def test_bad_arguments_are_named(tmp_path: Path):
    model = fitting("mixtral")
    with pytest.raises(ValueError, match=r"family must be one of .*'gpt5'"):
        export(model, "gpt5", tmp_path / "native")
    with pytest.raises(TypeError, match="Linear"):
        export(torch.nn.Linear(2, 2), "mixtral", tmp_path / "native")
    (tmp_path / "native").mkdir()
    with pytest.raises(FileExistsError):
        export(model, "mixtral", tmp_path / "native")
