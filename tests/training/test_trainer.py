"""The loop: learns, resumes bit for bit, counts state once a step, and stops with a reason."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal

import pytest
import torch

from moesaic.formats import atomic
from moesaic.formats.checkpoint import latest_checkpoint
from moesaic.training import (
    AverageConfig,
    MuonConfig,
    NonFiniteError,
    Observer,
    OptimizerConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
    Trainer,
)
from tests.training import standin

EVERYTHING = {
    "batch": 2,
    "length": 16,
    "accumulate": 2,
    "log_every": 3,
    "save_every": 4,
    "eval_every": 5,
    "optimizer": OptimizerConfig(name="muon", muon=MuonConfig(every=2, momentum_warmup=6)),
    "average": AverageConfig(decay=0.9, start=0.2, every=2),
    "stages": [StageConfig(0.4, 3, 8), StageConfig(1.0, 2, 16)],
    "schedule": ScheduleConfig(kind="wsd", warmup=3),
}
STATEFUL = {"bias": True, "bias_rate": 0.05, "noise_std": 0.3, "dropout": 0.1}


def train(out=None, *, resume=False, model=None, observers=(), data=None, **config):
    model = standin.model(**STATEFUL) if model is None else model
    trainer = Trainer(model, data or standin.data(), TrainConfig(**config), out=out, observers=observers)
    return trainer.train(resume=resume), model


class StopAt(Observer):
    """Breaks off after a step, as a kill would, but for what is on disk."""

    class Stop(BaseException):
        pass

    def __init__(self, step):
        self.step = step

    def on_step(self, step, progress):
        if step == self.step:
            raise self.Stop


def metrics(out):
    clock = ("seconds", "seconds_left", "tokens_per_second")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def test_it_learns_and_leaves_everything_where_the_report_says(tmp_path):
    report, _ = train(tmp_path, steps=60, batch=8, length=32, optimizer=OptimizerConfig(name="muon"))
    lines = metrics(tmp_path)
    assert lines[0]["loss"] > 3
    assert report.loss < 2
    assert report.eval_loss < 2
    assert (report.steps, report.moe_layers, report.experts, report.unmoved) == (60, 2, 8, [])
    assert report.items == 60 * 8 * 32
    assert report.model == tmp_path / "model"
    assert latest_checkpoint(tmp_path / "checkpoints").path == report.checkpoint
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 60
    assert (tmp_path / "routing.safetensors").is_file()
    assert any("every expert's weights moved" in line for line in report.lines())


def test_the_users_random_state_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(steps=2, batch=2, length=8)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.case("C12")
@pytest.mark.parametrize("stop", [5, 7, 12])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, stop):
    whole, model = train(tmp_path / "whole", steps=14, **EVERYTHING)
    with pytest.raises(StopAt.Stop):
        train(tmp_path / "cut", steps=14, observers=[StopAt(stop)], **EVERYTHING)
    other = standin.model(seed=9, **STATEFUL)
    resumed, again = train(tmp_path / "cut", steps=14, resume=True, model=other, **EVERYTHING)
    assert standin.same(standin.weights(model), standin.weights(again))
    assert (model.blocks[0].ffn.router.selection_bias_E != 0).any()
    first, second = (latest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "cut"))
    for part in ("model", "optimizer", "average", "state", "routing", "start", "best", "hooks"):
        assert standin.same(first.tensors(part), second.tensors(part)), part
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert (whole.loss, whole.eval_loss) == (resumed.loss, resumed.eval_loss)


def test_a_run_by_the_clock_ends_on_time_and_resumes(tmp_path):
    report, _ = train(tmp_path, seconds=0.5, batch=2, length=8, schedule=ScheduleConfig(kind="linear"))
    assert 0.5 <= report.seconds < 5
    assert report.steps > 1
    assert metrics(tmp_path)[-1]["step"] == report.steps
    longer, _ = train(tmp_path, resume=True, seconds=report.seconds + 0.3, batch=2, length=8,
                      schedule=ScheduleConfig(kind="linear"))  # fmt: skip
    assert longer.steps > report.steps


@pytest.mark.case("C11")
def test_state_moves_once_a_step_whatever_else_runs_forward():
    def biases(*, evaluations, checkpointing, accumulate):
        model = standin.model(layers=("dense", "moe", "plain", "moe"), bias=True, bias_rate=0.01)
        config = TrainConfig(
            steps=5, batch=8 // accumulate, length=16, accumulate=accumulate, checkpointing=checkpointing
        )
        trainer = Trainer(model, standin.data(), config)
        for _ in range(evaluations):
            trainer._evaluate()
        trainer.train()
        routers = [block.ffn.router for block in model.blocks if hasattr(block.ffn, "router")]
        return [router.selection_bias_E for router in routers if getattr(router, "selection_bias_E", None) is not None]

    clean = biases(evaluations=0, checkpointing=False, accumulate=1)
    assert len(clean) == 2
    for bias in clean:
        assert 0 < bias.abs().max() <= 2 * 5 * 0.01  # the rule keeps the mean at 0, so a step is up to twice the rate
    for other in (
        biases(evaluations=3, checkpointing=False, accumulate=1),
        biases(evaluations=0, checkpointing=True, accumulate=1),
        biases(evaluations=0, checkpointing=False, accumulate=2),
    ):
        assert all(torch.equal(a, b) for a, b in zip(clean, other))


def test_recomputation_changes_nothing():
    results = [train(steps=4, batch=2, length=16, checkpointing=on)[1] for on in (False, True)]
    assert standin.same(*map(standin.weights, results))


def test_averaged_weights_are_evaluated_and_saved(tmp_path):
    report, model = train(tmp_path, steps=6, batch=2, length=16, average=AverageConfig(decay=0.5))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    raw = latest_checkpoint(tmp_path / "checkpoints").tensors("model")
    average = latest_checkpoint(tmp_path / "checkpoints").tensors("average")
    assert torch.equal(saved["head.weight"], average["head.weight"])
    assert torch.equal(model.head.weight, raw["head.weight"])
    assert not torch.equal(saved["head.weight"], raw["head.weight"])
    assert report.eval_loss is not None


def test_bfloat16_autocast_trains():
    report, model = train(steps=20, batch=4, length=16, precision="bfloat16", optimizer=OptimizerConfig(name="muon"))
    assert report.eval_loss < 3.2
    assert model.head.weight.dtype == torch.float32


def test_a_loss_that_is_not_finite_stops_with_step_layer_and_checkpoint(tmp_path):
    class Poison(Observer):
        def __init__(self, model):
            self.model = model

        def on_step(self, step, progress):
            if step == 5:
                with torch.no_grad():
                    self.model.blocks[1].mix.weight[0, 0] = float("nan")

    model = standin.model()
    with pytest.raises(NonFiniteError, match=r"at step 6; .*blocks\.1\.mix.*step-00000004") as caught:
        train(tmp_path, model=model, observers=[Poison(model)], steps=9, batch=2, length=8, save_every=4)
    assert caught.value.step == 5
    assert caught.value.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    assert latest_checkpoint(tmp_path / "checkpoints").step == 4


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tmp_path):
    class Poison(Observer):
        def __init__(self, model):
            self.model = model

        def on_step(self, step, progress):
            if step == 8:
                with torch.no_grad():
                    self.model.embedding.weight[0] = float("inf")

    model = standin.model()
    with pytest.raises(NonFiniteError, match=r"embedding\.weight"):
        train(tmp_path, model=model, observers=[Poison(model)], steps=20, batch=2, length=8, save_every=4)
    assert latest_checkpoint(tmp_path / "checkpoints").step == 4


def test_a_gradient_that_is_not_finite_stops_before_anything_moves():
    model = standin.model()
    model.head.weight.register_hook(lambda grad: grad * float("inf"))
    before = standin.weights(model)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite at step 1; .*head\.weight"):
        train(model=model, steps=3, batch=2, length=8)
    assert standin.same(standin.weights(model), before)


def test_interrupt_finishes_the_step_saves_and_is_raised(tmp_path):
    class Press(Observer):
        def on_step(self, step, progress):
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, steps=50, batch=2, length=8, observers=[Press()])
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found.step in (3, 4)
    assert signal.getsignal(signal.SIGINT) is before
    report, _ = train(tmp_path, resume=True, steps=50, batch=2, length=8)
    assert report.steps == 50


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(tmp_path, monkeypatch, caplog):
    written = []

    def full(path):
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)

    monkeypatch.setattr(atomic, "_sync", full)
    with caplog.at_level(logging.ERROR, "moesaic"):
        report, _ = train(tmp_path, steps=5, batch=2, length=8, save_every=2)
    assert "No space left" in caplog.text
    assert "kept" in caplog.text
    assert "step-00000002" in report.failed_saves[0]
    assert any("checkpoint not written" in line for line in report.lines())
    assert latest_checkpoint(tmp_path / "checkpoints").step == 5


def test_a_full_disk_at_the_end_is_an_error_that_names_what_was_kept(tmp_path, monkeypatch):
    def full(path):
        if "step-00000005" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "_sync", full)
    with pytest.raises(OSError, match="step-00000004") as caught:
        train(tmp_path, steps=5, batch=2, length=8, save_every=2)
    assert caught.value.errno == errno.ENOSPC
    assert latest_checkpoint(tmp_path / "checkpoints").step == 4


def test_what_resume_refuses(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume from"):
        train(resume=True, steps=2)
    with pytest.raises(ValueError, match="no checkpoint in"):
        train(tmp_path, resume=True, steps=2, batch=2, length=8)
    train(tmp_path, steps=2, batch=2, length=8)
    with pytest.raises(ValueError, match="holds a run up to step-00000002: resume it"):
        train(tmp_path, steps=2, batch=2, length=8)
    with pytest.raises(ValueError, match=r"train\.batch is 3, .* trained with 2"):
        train(tmp_path, resume=True, steps=2, batch=3, length=8)
    with pytest.raises(ValueError, match="other tokens"):
        train(tmp_path, resume=True, steps=2, batch=2, length=8, data=standin.data(1500))
    with pytest.raises(ValueError, match=r"model\.safetensors lacks .*blocks\.2"):
        train(tmp_path, resume=True, steps=2, batch=2, length=8, model=standin.model(layers=("moe",) * 3, **STATEFUL))
    again, _ = train(tmp_path, resume=True, steps=2, batch=2, length=8)
    assert again.steps == 2


def test_a_text_shorter_than_a_window_is_refused_at_the_door():
    with pytest.raises(ValueError, match="a window of length 5000 needs 5001"):
        train(steps=2, length=5000)
