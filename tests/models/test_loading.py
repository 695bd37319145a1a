"""Opening checkpoints: exact where they are whole, an error that names what is wrong where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from moesaic.layers import MoE
from moesaic.models import MoesaicConfig, MoesaicForCausalLM, load
from moesaic.models.parts import ROUTERS
from moesaic.routing import end_step
from tests.models.small import small_config, small_model, tokens

WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_model(shared={"width": 8}).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_a_saved_model_is_the_same_in_every_bit(router: str, tmp_path: Path):
    model = small_model(router, ngram={"orders": [2], "rows": 32}, shift=1, shared={"width": 8, "gated": True}).train()
    model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    end_step(model)  # biases, thresholds and bases are not what a fresh model has
    model.eval().save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again, MoesaicForCausalLM) and not again.training
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 9)).logits, again(tokens(2, 9)).logits)


def test_auto_classes_open_it(saved: Path):
    assert isinstance(AutoConfig.from_pretrained(saved), MoesaicConfig)
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert isinstance(model, MoesaicForCausalLM)
    with torch.no_grad():
        assert torch.equal(model(tokens(1, 5)).logits, load(saved)(tokens(1, 5)).logits)


def test_tied_embeddings_are_stored_once_and_tied_again(tmp_path: Path):
    small_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    again = load(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_zero_starts_are_not_drawn_again_on_load(tmp_path: Path):
    model = small_model(zero_init_outputs=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    for name, value in load(tmp_path).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.case("C01")
@pytest.mark.case("C12")
def test_in_bf16_routers_and_their_state_stay_float32_and_exact(tmp_path: Path):
    model = small_model({"name": "top_k", "top_k": 2, "score": "sigmoid", "bias": True})
    routers = [module.router for module in model.modules() if isinstance(module, MoE)]
    for router in routers:
        router.selection_bias_E.copy_(torch.tensor([0.1, -0.30001, 0.70003, 1e-4]))
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.bfloat16)
    assert again.model.embed_tokens.weight.dtype == torch.bfloat16
    others = [module.router for module in again.modules() if isinstance(module, MoE)]
    for router, other in zip(routers, others, strict=True):
        assert torch.equal(router.weight_ED, other.weight_ED)
        assert torch.equal(router.selection_bias_E, other.selection_bias_E)
        x_TD = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        assert torch.equal(router(x_TD).expert_ids_TK, other(x_TD).expert_ids_TK)
    # And through a second round in bf16.
    again.save_pretrained(tmp_path / "bf16")
    third = load(tmp_path / "bf16")
    assert third.model.embed_tokens.weight.dtype == torch.bfloat16
    for name, value in again.state_dict().items():
        assert torch.equal(value, third.state_dict()[name]), name


def test_a_model_of_transformers_opens_too(tmp_path: Path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    native = MixtralForCausalLM(config).eval()
    native.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(tokens(1, 5)).logits, native(tokens(1, 5)).logits)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(next(name for name in tensors if "gate" in name)))
    with pytest.raises(ValueError, match=r"tensors missing.*gate"):
        load(tmp_path)


# What is wrong is named ----------------------------------------------------------------------------------------------
def rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1", "block.1")] = tensors.pop(name)


def another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.up_EFD"] = tensors["model.layers.0.mlp.experts.up_EFD"][:3].clone()


@pytest.mark.case("C20")
@pytest.mark.case("C21")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.up_EFD"),
            r"1 tensors missing: model\.layers\.1\.mlp\.experts\.up_EFD",
        ),
        (lambda t: t.pop("model.layers.0.mlp.router.weight_ED"), r"missing: model\.layers\.0\.mlp\.router\.weight_ED"),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
        (rename, r"missing: model\.layers\.1.*left over.*model\.block\.1"),
        (lambda t: t.update({"model.layers.0.mlp.experts.up_scale": torch.ones(3)}), r"left over.*up_scale"),
        (another_shape, r"of another shape: model\.layers\.0\.mlp\.experts\.up_EFD"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(saved: Path, change: Callable[..., Any], words: str):
    edit_tensors(saved, change)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load(saved)
    with pytest.raises(ValueError, match=r"tensors|mismatch"):  # not through transformers either
        MoesaicForCausalLM.from_pretrained(saved)


def test_values_that_are_not_finite_are_an_error(saved: Path):
    edit_tensors(saved, lambda tensors: tensors["model.layers.0.mlp.experts.down_EDF"].view(-1)[3].fill_(torch.nan))
    with pytest.raises(ValueError, match=r"1 tensors with NaN or inf: model\.layers\.0\.mlp\.experts\.down_EDF"):
        load(saved)


@pytest.mark.case("C21")
@pytest.mark.parametrize("size", [0, 5, 300, -1])
def test_a_truncated_file_is_an_error(saved: Path, size: int):
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(data[:size])
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is (truncated|damaged)"):
        load(saved)


@pytest.mark.case("C21")
def test_a_missing_shard_is_an_error(tmp_path: Path):
    model = small_model()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(tokens(1, 4)).logits, model(tokens(1, 4)).logits)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of {len(shards)} weight files: {shards[1].name}"):
        load(tmp_path)


def test_folders_without_a_model(tmp_path: Path, saved: Path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load(tmp_path / "empty")
    (saved / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of 1 weight files: {WEIGHTS}"):
        load(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hidden_size": 4}'])
def test_a_configuration_that_cannot_be_read(saved: Path, text: str):
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not the configuration of a model"):
        load(saved)


def test_a_newer_format_is_refused(saved: Path):
    edit_config(saved, moesaic_format=99)
    with pytest.raises(ValueError, match=r"format 99, this moesaic reads up to .*install a newer moesaic"):
        load(saved)
    with pytest.raises(Exception, match="moesaic_format is 99"):
        MoesaicForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router": {"name": "oracle"}}, r"router names 'oracle'; allowed are \[.*'top_k'"),
        ({"router": {"name": "top_k", "top_k": 9}}, "top_k must be between 1 and num_experts = 4, got 9"),
        ({"router": {"name": "top_k", "tok_k": 2}}, r"router 'top_k' does not take \['tok_k'\]"),
        ({"experts": {"name": "nothing"}}, r"experts names 'nothing'; allowed are \['ffn'"),
        ({"losses": [{"name": "luck"}]}, "loss names 'luck'"),
    ],
)
def test_unknown_parts_in_a_configuration_are_named(saved: Path, changes: dict[str, Any], words: str):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=words):
        load(saved)
    with pytest.raises(ValueError, match=words):
        MoesaicForCausalLM(small_config(**changes))
