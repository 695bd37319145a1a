"""Checkpoints open as the class that they name; code that they bring is neither run nor offered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import moesaic
from moesaic.analysis.text import read_batches
from moesaic.cli.main import main
from moesaic.models.handle import moe_layers
from moesaic.models.saving import save
from moesaic.models.surgery import drop_experts
from tests.models.families import _SETTINGS, VOCABULARY, build, run, token_ids

BOMB = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def composite() -> Any:
    """A tiny Qwen3-VL-MoE: vision tower, and the experts in its text model."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    known = kind.config_class.sub_configs["text_config"].__dataclass_fields__
    text = {key: value for key, value in _SETTINGS.items() if key in known}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(0)
    return kind(kind.config_class(text_config={**text, "rope_parameters": rope}, vision_config=vision)).eval()


@pytest.mark.parametrize("ragged", [False, True])
@torch.no_grad()
def test_a_composite_model_is_saved_opened_and_inspected(ragged: bool, tmp_path: Path, capsys: Any) -> None:
    model = composite()
    drop_experts(model, {0: [3]} if ragged else [3])
    saved = save(model, tmp_path / "cut")
    assert saved.native is not ragged
    opened: Any = moesaic.load(saved.path)
    assert type(opened) is type(model)
    assert [layer.num_experts for layer in moe_layers(opened)] == list(saved.experts.values())
    assert all(torch.equal(value, opened.state_dict()[key]) for key, value in model.state_dict().items())
    opened.set_experts_implementation("eager")
    model.set_experts_implementation("eager")
    assert (run(opened) - run(model)).abs().max() < 1e-5
    capsys.readouterr()
    main_of("inspect", saved.path, "--tokens", 64, "--json")
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert [layer["experts"] for layer in sizes["layers"]] == list(saved.experts.values())


def encoder_decoder() -> Any:
    kind = transformers.SwitchTransformersForConditionalGeneration
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    torch.manual_seed(0)
    config = kind.config_class(vocab_size=VOCABULARY, **sizes, **experts, decoder_start_token_id=5)
    return kind(config).eval()


@torch.no_grad()
def test_an_encoder_decoder_opens_and_reads_a_text(tmp_path: Path) -> None:
    model = encoder_decoder()
    model.save_pretrained(tmp_path)
    opened: Any = moesaic.load(tmp_path)
    assert type(opened) is type(model)
    reading = read_batches(tmp_path, opened, None, 40, 16)
    for batch in reading.batches:
        assert (batch["decoder_input_ids"][:, 0] == 5).all()
        assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["input_ids"][:, :-1])
        assert torch.equal(opened(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("name", ["openai_privacy_filter", "step3p7"])
@torch.no_grad()
def test_a_model_without_a_causal_head_opens_as_its_own_class(name: str, tmp_path: Path) -> None:
    """A classifier of tokens, and a class that transformers does not export."""
    model: nn.Module = build(name)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    opened = moesaic.load(tmp_path)
    assert type(opened) is type(model) and len(moe_layers(opened)) == len(moe_layers(model))


@torch.no_grad()
def test_without_an_architecture_the_model_type_decides(tmp_path: Path) -> None:
    model: Any = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    for architectures in (None, [], ["SomethingRenamed"]):
        edit_config(tmp_path, architectures=architectures)
        assert type(moesaic.load(tmp_path)) is type(model)


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    build("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    for name in ("modeling_own", "configuration_own"):
        (tmp_path / f"{name}.py").write_text(BOMB)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(tmp_path, auto_map=own, model_type="own_moe", architectures=["OwnForCausalLM"])
    return tmp_path


@pytest.mark.parametrize("known_type", [False, True])
def test_code_in_a_checkpoint_is_refused_in_one_line(with_code: Path, known_type: bool, capsys: Any) -> None:
    if known_type:
        edit_config(with_code, model_type="qwen3_moe")
    with pytest.raises(ValueError, match=r"brings code of its own .* does not run code from checkpoints") as refused:
        moesaic.load(with_code)
    assert "\n" not in str(refused.value) and "moe'" in str(refused.value)
    assert capsys.readouterr().out == ""
    assert not (with_code / "ran").exists()


def test_a_y_at_the_terminal_runs_no_code(with_code: Path) -> None:
    """The library would ask on stdout; here nothing is asked, so nothing is answered."""
    words = [sys.executable, "-m", "moesaic", "inspect", str(with_code), "--json"]
    done = subprocess.run(words, input="y\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "own_moe" in done.stderr
    assert not (with_code / "ran").exists()


@torch.no_grad()
def test_code_beside_a_known_architecture_is_ignored(with_code: Path) -> None:
    edit_config(with_code, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    opened = moesaic.load(with_code)
    assert torch.isfinite(opened(token_ids()).logits).all()
    assert not (with_code / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_type", "architectures": ["NoSuchModel"]},
        {"model_type": "clip_vision_model", "architectures": ["NoSuchModel"], "hidden_size": "wide"},
        {"num_experts": "many"},
        {"num_attention_heads": 7, "num_key_value_heads": 3, "head_dim": None},
    ],
)
def test_a_refusal_is_one_line_that_names_the_model_type(changes: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    edit_config(tmp_path, **changes)
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(tmp_path), "--tokens", "16", "--json"])
    out, err = capsys.readouterr()
    line = err.strip().splitlines()[-1]
    assert left.value.code == 2 and out == "" and len(line) < 700
    assert repr(changes.get("model_type", "qwen3_moe")) in line


@pytest.mark.parametrize(
    ("option", "value"), [("--tokens", 99_999_999_999), ("--length", 9_999_999_999), ("--tokens", 10**18)]
)
def test_inspect_is_bounded_by_memory(option: str, value: int, tmp_path: Path, capsys: Any) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    words = ["inspect", tmp_path, option, value, *(("--tokens", value) if option == "--length" else ())]
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert left.value.code == 2
    assert f"({option}) is {value:,}" in line and "GB of memory are free" in line and "at most about" in line


def main_of(*words: object) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code in (0, None)
