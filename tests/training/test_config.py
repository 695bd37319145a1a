"""Config files: strict keys and types, overrides, ranges."""

from __future__ import annotations

import pytest

from moesaic.training import OptimizerConfig, RunConfig, ScheduleConfig, StageConfig, TrainConfig
from moesaic.training.config import DataConfig, MuonConfig
from moesaic.training.config_file import from_mapping, read_run_config

RUN = """
model: {hidden_size: 32}
data: {path: text.txt, tokenizer: char}
train:
  steps: 10
  clip: null
  stages: [{until: 0.5, batch: 4, length: 8}, {until: 1, batch: 2, length: 16}]
  optimizer: {name: muon, lr: 1e-3, betas: [0.8, 0.9], role_lr: {router: 2e-3}, muon: {every: 2}}
"""


def read(tmp_path, text=RUN, overrides=()):
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "run.yaml").write_text(text)
    return read_run_config(tmp_path / "run.yaml", overrides)


def test_a_file_becomes_a_config(tmp_path):
    run = read(tmp_path)
    assert isinstance(run, RunConfig)
    assert run.model == {"hidden_size": 32}
    assert run.data.path == str(tmp_path / "text.txt")
    assert run.train.clip is None
    assert run.train.stages == [StageConfig(0.5, 4, 8), StageConfig(1.0, 2, 16)]
    assert run.train.optimizer.lr == 0.001  # YAML itself reads 1e-3 as a word
    assert run.train.optimizer.betas == (0.8, 0.9)
    assert run.train.optimizer.role_lr == {"router": 0.002}
    assert run.train.optimizer.muon.every == 2


def test_overrides(tmp_path):
    run = read(tmp_path, overrides=["train.steps=20", "train.schedule.kind=wsd", "model.hidden_size=64", "out=there"])
    assert (run.train.steps, run.train.schedule.kind, run.model["hidden_size"], run.out) == (20, "wsd", 64, "there")
    for bad, message in (("train.steps", "KEY.KEY=VALUE"), ("train.steps.x=1", "is a value"), ("a=[", "not YAML")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, overrides=[bad])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.step=3", r"unknown key 'train\.step'; allowed are .*'steps'"),
        ("train.optimizer.muon.rate=3", r"unknown key 'train\.optimizer\.muon\.rate'; allowed are .*'iterations'"),
        ("training=3", r"unknown key 'training'; allowed are \['data', 'model', 'out', 'train'\]"),
        ("train.steps=2.5", r"train\.steps must be a whole number, got 2\.5"),
        ("train.clip=much", r"train\.clip must be a number, got 'much'"),
        ("train.checkpointing=1", r"train\.checkpointing must be true or false"),
        ("train.stages=3", r"train\.stages must be a list"),
        ("train.optimizer.betas=[0.9]", r"betas must be a list of 2 values"),
        ("train.steps=0", r"train: steps must be at least 1, got 0"),
        ("train.precision=fp8", r"precision must be one of"),
        ("train.optimizer.role_lr={routers: 1}", r"role_lr names the role 'routers'; allowed are"),
        ("train.schedule.kind=step", r"kind must be one of"),
        ("data.path=null", r"data\.path must be text"),
        ("data.eval=0.99", None),
        ("train.stages=[{until: 0.5, batch: 1, length: 1}]", "end at 1"),
    ],
)
def test_refusals(tmp_path, change, message):
    if message is None:
        assert read(tmp_path, overrides=[change]).data.eval == 0.99
        return
    with pytest.raises(ValueError, match=message):
        read(tmp_path, overrides=[change])


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_run_config(tmp_path / "nothing.yaml")
    with pytest.raises(ValueError, match="must hold a mapping"):
        read(tmp_path, "- 1\n")
    with pytest.raises(ValueError, match="is not YAML"):
        read(tmp_path, "a: [")
    with pytest.raises(ValueError, match=r"key 'data' is missing"):
        read(tmp_path, "model: {}\ntrain: {steps: 1}\n")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TrainConfig, {}),
        (TrainConfig, {"seconds": -1}),
        (TrainConfig, {"steps": 1, "clip": 0}),
        (TrainConfig, {"steps": 1, "aux": -1}),
        (ScheduleConfig, {"decay": 0}),
        (ScheduleConfig, {"final": 2}),
        (OptimizerConfig, {"lr": float("nan")}),
        (OptimizerConfig, {"betas": [0.9, 1.0]}),
        (MuonConfig, {"iterations": 9}),
        (MuonConfig, {"experts": "some"}),
        (MuonConfig, {"momentum": 1.0}),
        (DataConfig, {"path": ""}),
        (DataConfig, {"path": "x", "eval": 0.6, "test": 0.4}),
        (StageConfig, {"until": 0, "batch": 1, "length": 1}),
    ],
)
def test_values_out_of_range(kind, values):
    with pytest.raises(ValueError, match=r"must|missing"):
        from_mapping(kind, values)
