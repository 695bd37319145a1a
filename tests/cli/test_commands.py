"""The commands as a user types them: what they print and write, and how they end."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

import moesaic
from moesaic.cli.main import main

CONFIG = """
model: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_experts: 4, expert_width: 16}
data: {path: TEXT, tokenizer: char, eval: 0.1}
train: {steps: 6, batch: 4, length: 16, log_every: 2, save_every: 3}
"""


def call(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model with its tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (folder / "config.yaml").write_text(CONFIG.replace("TEXT", str(folder / "text.txt")))
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder / "config.yaml"), "--out", str(folder / "run"), "--json"])
    assert not end.value.code
    return folder / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("TEXT", str(text)))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("olmoe")
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    OlmoeForCausalLM(
        OlmoeConfig(vocab_size=64, num_experts=4, num_experts_per_tok=2, pad_token_id=0, **sizes)
    ).save_pretrained(folder)
    return folder


def test_train_writes_a_run_that_resumes_and_loads(capsys: Any, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, _ = call(capsys, "train", config, "--out", run, "--json", "--threads", 1)
    report = json.loads(out)
    assert code == 0
    assert report["steps"] == 6
    assert (run / "metrics.jsonl").exists()
    code, out, _ = call(capsys, "train", config, "--out", run, "--resume", "--json", "--set", "train.steps=8")
    assert code == 0
    assert json.loads(out)["steps"] == 8
    assert len(moesaic.moe_layers(moesaic.load(run))) == 2
    code, _, err = call(capsys, "train", config, "--out", run)
    assert code == 2
    assert "resume it, or name another folder" in err


def test_the_same_seed_trains_the_same_model(capsys: Any, config: Path, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        code, out, _ = call(capsys, "train", config, "--out", tmp_path / name, "--seed", seed, "--json")
        assert code == 0
        losses.append(json.loads(out)["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_inspect_prints_and_writes(capsys: Any, checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, _ = call(capsys, "inspect", checkpoint, "--tokens", 256, "--html", page)
    assert code == 0
    assert "covered 2 layers, 8 experts" in out
    assert page.stat().st_size < 3e6
    code, out, _ = call(capsys, "inspect", checkpoint, "--tokens", 256, "--json")
    assert code == 0
    assert json.loads(out)["sizes"]["layers"][0]["experts"] == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "missing"),
        ("empty text", "empty"),
        ("binary text", "UTF-8"),
        ("no experts", "no MoE layer"),
        ("truncated", "damaged"),
        ("bad page", ".html"),
        ("few tokens", "--tokens"),
    ],
)
def test_inspect_refuses_in_one_line(
    capsys: Any, checkpoint: Path, run: Path, tmp_path: Path, name: str, words: str
) -> None:
    arguments: list[object] = ["inspect", checkpoint, "--tokens", 64]
    text = tmp_path / "text.txt"
    if name == "missing":
        arguments[1] = tmp_path / "missing"
    elif name == "empty text":
        text.write_text("")
        arguments = ["inspect", run, "--text", text]
    elif name == "binary text":
        text.write_bytes(b"\xff\xfe\x00\x80" * 20)
        arguments = ["inspect", run, "--text", text]
    elif name == "no experts":
        LlamaForCausalLM(
            LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        ).save_pretrained(tmp_path / "dense")
        arguments[1] = tmp_path / "dense"
    elif name == "truncated":
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in checkpoint.iterdir():
            data = file.read_bytes()
            (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
        arguments[1] = broken
    elif name == "bad page":
        arguments += ["--html", tmp_path / "page.pdf"]
    else:
        arguments[3] = 1
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    lines = [line for line in err.replace("\r", "\n").splitlines() if line and "it/s]" not in line]  # bars of libraries
    assert len(lines) == 1


def test_doctor(capsys: Any) -> None:
    code, out, _ = call(capsys, "doctor", "--quick", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert facts["read_gb_per_s"] is None
    assert set(facts) >= {"cpu", "cpu_flags", "compiler", "extras", "slow", "threads"}
    code, out, _ = call(capsys, "doctor", "--quick")
    assert code == 0
    assert "read bandwidth" in out


def test_quickstart_ends_with_loss_load_sample_and_what_to_do(capsys: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, _ = call(capsys, "quickstart", "--seconds", 1.5, "--out", run, "--characters", 40, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["steps"] >= 1
    assert 0 < result["held_out_loss"] < 5
    assert all(sum(shares) == pytest.approx(1, abs=0.01) for shares in result["load"].values())
    assert len(result["sample"]) > 10
    assert Path(result["model"]).is_dir()
    assert Path(result["routing"]).is_file()
    code, _, err = call(capsys, "quickstart", "--quick", "--seconds", 3)
    assert code == 2
    assert "--quick" in err


def test_version_help_and_unknown_commands() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "moesaic.cli.main", *arguments], capture_output=True, text=True)

    assert run("--version").stdout.split() == ["moesaic", moesaic.__version__]
    unknown = run("inspekt")
    assert unknown.returncode == 2
    assert "inspekt" in unknown.stderr
    assert run("train", "nowhere.yaml").returncode == 2
