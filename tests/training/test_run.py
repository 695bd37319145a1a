"""A config file with the real model: train, interrupt, resume, open, and the command's manners."""

from __future__ import annotations

import json

import pytest
import torch

from moesaic.cli.main import main
from moesaic.training.config_file import read_run_config
from moesaic.training.run import train_from_config

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
RUN = """
model: {hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, num_experts: 4,
        expert_width: 16, mlp_layer_types: [dense, moe], router: {name: top_k, top_k: 2, bias: true},
        losses: [{name: balance, coefficient: 0.01}], ngram: {orders: [2], rows: 50}}
data: {path: text.txt, tokenizer: char, eval: 0.1, test: 0.1}
train: {steps: 12, batch: 4, length: 16, log_every: 4, save_every: 5,
        optimizer: {name: muon, lr: 1e-2, role_lr: {router: 2e-3}}}
"""


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def run_cli(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0


def test_the_command_trains_and_answers_in_json(config_file, tmp_path, capsys):
    assert run_cli("train", config_file, "--out", tmp_path / "run", "--json", "--threads", 1) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["steps"] == 12
    assert report["moe_layers"] == 1
    assert report["unmoved"] == []
    assert report["eval_loss"] < 3.3
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["model_type"] == "moesaic"


def test_a_resumed_run_of_the_real_model_is_bit_for_bit(config_file, tmp_path):
    from moesaic.formats.checkpoint import latest_checkpoint
    from tests.training.test_trainer import StopAt, standin

    finished = []
    for stop in (None, 7):
        config = read_run_config(config_file, [f"out={tmp_path / str(stop)}"])
        if stop is not None:
            with pytest.raises(StopAt.Stop):
                train_from_config(config, observers=[StopAt(stop)])
        train_from_config(config, resume=stop is not None)
        finished.append(latest_checkpoint(tmp_path / str(stop) / "checkpoints"))
    for part in ("model", "optimizer", "state", "routing"):
        assert standin.same(finished[0].tensors(part), finished[1].tensors(part)), part


def test_the_finished_model_opens_with_its_tokenizer(config_file, tmp_path):
    import moesaic
    from moesaic.data.tokenize import Tokenizer

    config = read_run_config(config_file, [f"out={tmp_path / 'run'}", "train.steps=3"])
    report = train_from_config(config)
    model = moesaic.load(report.model)
    tokenizer = Tokenizer.load(report.model)
    ids = torch.from_numpy(tokenizer.encode("the fox")).long()[None]
    logits = model.eval()(ids).logits
    assert logits.shape == (1, 7, tokenizer.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "out is missing"),
        (["--set", "train.stepz=3", "--out", "x"], "unknown key 'train.stepz'"),
        (["--set", "model.hidden=3", "--out", "x"], "unknown key 'model.hidden'"),
        (["--set", "model.router={name: best}", "--out", "x"], "router names 'best'"),
        (["--set", "model.vocab_size=3", "--out", "x"], "the tokenizer decides it"),
        (["--resume", "--out", "nowhere"], "no checkpoint in"),
        (["--device", "abacus", "--out", "x"], "device is 'abacus'"),
        (["--set", "data.path=nothing.txt", "--out", "x"], "does not exist"),
        (["--threads", "0", "--out", "x"], "--threads must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(config_file, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert run_cli("train", config_file, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_ctrl_c_saves_and_leaves_with_130(config_file, tmp_path, monkeypatch, caplog):
    import os
    import signal

    from moesaic.formats.checkpoint import latest_checkpoint
    from moesaic.training import ProgressLine

    def press(self, step, progress):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressLine, "on_step", press)
    assert run_cli("train", config_file, "--out", tmp_path / "run") == 130
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").step in (3, 4)
    assert "interrupted at step" in caplog.text
    assert "checkpoints/step-" in caplog.text


def test_a_diverged_run_is_code_1(config_file, tmp_path, capsys):
    changes = ["--set", "train.optimizer.lr=1e30", "--set", "train.clip=null", "--set", "train.schedule.warmup=0"]
    assert run_cli("train", config_file, *changes, "--out", tmp_path / "run") == 1
    assert "at step" in capsys.readouterr().err
