"""Saving after surgery: stock transformers opens what it can express, moesaic the rest, and nobody opens half."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moesaic.models import load
from moesaic.models.handle import moe_layers
from moesaic.models.saving import save
from moesaic.models.surgery import drop_experts, duplicate_experts, rearrange_experts
from tests.models.families import EXPERTS, FAMILIES, TOP_K, build, run
from tests.models.small import small_model, tokens
from tests.models.test_surgery import droppable, roomy

MASKABLE = {"minimax_m2", "afmoe", "gpt_oss", "openai_privacy_filter", "inkling", "step3p7"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stock(model: nn.Module, path: Path) -> nn.Module:
    """The family's own class on the folder, as somebody without moesaic opens it."""
    opened, report = type(model).from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    opened.set_experts_implementation("eager")
    return opened.eval()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.case("C12")
def test_stock_transformers_opens_a_uniform_cut(name: str, tmp_path: Path) -> None:
    model, groups = roomy(name)
    gone = droppable(name, groups)
    drop_experts(model, gone)
    saved = save(model, tmp_path / "cut")
    assert saved.native and saved.bytes > 0
    opened = stock(model, saved.path)
    assert {layer.num_experts for layer in moe_layers(opened)} == {FAMILIES[name].experts - len(gone)}
    assert (run(opened) - run(model)).abs().max() < 1e-5
    assert "moesaic" not in (saved.path / "config.json").read_text()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.case("C18")
def test_layers_that_differ_come_back_exactly(name: str, tmp_path: Path) -> None:
    model, groups = roomy(name)
    drop_experts(model, {0: droppable(name, groups)})
    saved = save(model, tmp_path / "cut")
    assert not saved.native
    opened: Any = load(saved.path)
    assert type(opened) is type(model)
    assert [layer.num_experts for layer in moe_layers(opened)] == list(saved.experts.values())
    before = model.state_dict()
    assert all(torch.equal(value, before[key]) for key, value in opened.state_dict().items())
    opened.set_experts_implementation("eager")
    assert (run(opened) - run(model)).abs().max() < 1e-5
    again = save(opened, tmp_path / "again")
    assert again.experts == saved.experts and not again.native


@torch.no_grad()
@pytest.mark.case("C18")
def test_a_plan_by_layer_with_smaller_top_k(tmp_path: Path) -> None:
    model: Any = build("qwen3_moe")
    plan = {0: [0, 2], 1: [7, 6, 5, 4, 1], 2: [0, 1, 2, 3, 4, 5, 6, 7, 7]}
    rearrange_experts(model, plan, clamp_k=True)
    assert [(x.num_experts, x.top_k) for x in moe_layers(model)] == [(2, 2), (5, TOP_K), (9, TOP_K)]
    save(model, tmp_path / "cut")
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path / "cut")
    opened: Any = load(tmp_path / "cut")
    opened.set_experts_implementation("eager")
    assert [(x.num_experts, x.top_k) for x in moe_layers(opened)] == [(2, 2), (5, TOP_K), (9, TOP_K)]
    assert torch.equal(run(opened), run(model))
    drop_experts(opened, {1: [0], 2: [0, 1, 2, 3, 8]}, clamp_k=True)
    duplicate_experts(opened, {0: [0, 1]})
    for layer in moe_layers(opened):
        layer.shell.router.top_k = 2
    opened.config.num_experts_per_tok = 2
    drop_experts(opened, {1: [0]})
    drop_experts(opened, {0: [0], 2: [0]})
    assert {x.num_experts for x in moe_layers(opened)} == {3}
    assert save(opened, tmp_path / "uniform").native
    assert torch.equal(run(stock(opened, tmp_path / "uniform")), run(opened))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
@pytest.mark.case("C18")
def test_masked_keeps_the_stock_shape_or_says_why_not(name: str, tmp_path: Path) -> None:
    model, groups = roomy(name)
    drop_experts(model, {0: droppable(name, groups)})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain, config = run(model), model.config.to_dict()
    written = {"architectures": [type(model).__name__], "dtype": "float32"}  # transformers notes these when it saves
    if name in MASKABLE:
        assert save(model, tmp_path / "masked", masked=True).native
        opened = stock(model, tmp_path / "masked")
        assert {layer.num_experts for layer in moe_layers(opened)} == {EXPERTS}
        assert (run(opened) - plain).abs().max() < 1e-5
    else:
        words = "inside groups|has no bias|by softmax scores|form that cannot be padded"
        with pytest.raises(ValueError, match=rf"masked=True: layer .* ({words})"):
            save(model, tmp_path / "masked", masked=True)
        assert not list(tmp_path.iterdir())
    assert model.config.to_dict() | written == config | written
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize(("biases", "kept"), [("equal", [0, 2, 3, 4, 6, 7]), ("different", [1, 3, 4, 6])])
@torch.no_grad()
def test_softmax_scores_with_a_bias_for_choosing_are_masked_where_that_is_exact(
    biases: str, kept: list[int], tmp_path: Path
) -> None:
    """ERNIE 4.5: one bias for all experts, or a count of which the layer's own is a whole part."""
    model: Any = build("ernie4_5_moe")
    for layer in moe_layers(model):
        bias = layer.module.get_parameter("gate.moe_statics.e_score_correction_bias")
        bias.copy_(torch.full_like(bias, 0.2) if biases == "equal" else torch.linspace(-0.2, 0.2, EXPERTS)[None])
    rearrange_experts(model, {0: kept})
    plain, before = run(model), {key: value.clone() for key, value in model.state_dict().items()}
    assert save(model, tmp_path / "masked", masked=True).native
    opened = stock(model, tmp_path / "masked")
    assert {layer.num_experts for layer in moe_layers(opened)} == {EXPERTS}
    ids = torch.randint(3, 64, (64, 16), generator=torch.Generator().manual_seed(3))
    assert (run(opened) - plain).abs().max() < 1e-5 and (run(opened, ids) - run(model, ids)).abs().max() < 1e-5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_models_of_ours(tmp_path: Path) -> None:
    model = small_model({"name": "top_k", "top_k": 2, "score": "sigmoid", "bias": True}, shared={"width": 8})
    model.model.layers[1].mlp.router.selection_bias_E.copy_(torch.randn(4))
    drop_experts(model, [1])
    assert save(model, tmp_path / "uniform").native
    opened = load(tmp_path / "uniform")
    assert opened.config.num_experts == 3
    assert torch.equal(opened(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
    drop_experts(model, {1: [0, 2]}, clamp_k=True)
    assert not save(model, tmp_path / "ragged").native
    opened = load(tmp_path / "ragged")
    assert [(x.num_experts, x.top_k) for x in moe_layers(opened)] == [(3, 2), (1, 1)]
    assert torch.equal(opened(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


@torch.no_grad()
def test_half_precision_shards_and_tied_embeddings(tmp_path: Path) -> None:
    model: Any = build("qwen3_moe", tie_word_embeddings=True).bfloat16()
    model.tie_weights()
    drop_experts(model, {1: [0, 4]})
    save(model, tmp_path / "cut", max_shard_size="40KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    opened: Any = load(tmp_path / "cut")
    assert opened.dtype == torch.bfloat16 and opened.lm_head.weight is opened.model.embed_tokens.weight
    before = model.state_dict()  # logits differ: .bfloat16() rounds the positions' frequencies too, loading does not
    assert all(
        value.dtype == before[k].dtype and torch.equal(value, before[k]) for k, value in opened.state_dict().items()
    )
    save(opened, tmp_path / "again")
    assert torch.equal(run(load(tmp_path / "again")), run(opened))


@pytest.mark.case("C21")
def test_missing_tensors_and_damaged_notes_are_refused(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    drop_experts(model, {1: [0]})
    folder = save(model, tmp_path / "cut").path
    tensors = load_file(folder / "model.safetensors")
    short = {key: value for key, value in tensors.items() if ".layers.1.mlp.experts.6." not in key}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts"):
        load(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for note, words in (
        ({"layers": {"model.layers.1.mlp": {"num_experts": 7, "top_k": 3}}}, "names"),
        ({"layers": 3}, "is damaged"),
        ({**config["moesaic_experts"], "module": "os"}, None),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "moesaic_experts": note}))
        if words is None:
            assert len(moe_layers(load(folder))) == 3
        else:
            with pytest.raises(ValueError, match=words):
                load(folder)


def test_nothing_is_written_where_numbers_disagree(tmp_path: Path) -> None:
    model: Any = build("qwen3_moe")
    model.config.num_local_experts = 6
    with pytest.raises(ValueError, match="nothing was written"):
        save(model, tmp_path / "cut")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        save(nn.Linear(2, 2), tmp_path / "cut")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError):
        save(build("qwen3_moe"), tmp_path / "there")  # type: ignore[arg-type]
