"""The engine trains any task: against a loop written by hand, with hooks, growth, early stopping, streams."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moesaic.experts import FFNExperts
from moesaic.formats.checkpoint import latest_checkpoint
from moesaic.layers import MoE
from moesaic.losses import BalanceLoss
from moesaic.routing import TopKRouter, end_step
from moesaic.training import (
    EarlyStoppingConfig,
    Evaluation,
    Hook,
    OptimizerConfig,
    Optimizers,
    Task,
    TaskLoss,
    TrainConfig,
    Trainer,
    build_optimizers,
    train_stream,
)
from moesaic.training.schedules import schedule_factor
from moesaic.training.task import auxiliary_loss
from tests.training import standin
from tests.training.test_trainer import StopAt


class Classifier(nn.Module):
    """An MoE between two linear maps: nothing of language in it."""

    def __init__(self, wide: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(wide, 8)
        self.moe = MoE(FFNExperts(8, 8, 4), TopKRouter(8, 4, 2, bias=True, bias_rate=0.01), losses=[BalanceLoss(0.01)])
        self.head = nn.Linear(8, classes)

    def forward(self, x_TD):
        y_TD, routing = self.moe(self.embed(x_TD))
        return self.head(y_TD), routing


class Classification(Task[tuple[torch.Tensor, torch.Tensor]]):
    unit = "rows"
    loss_unit = "nats per row"

    def __init__(self, seed: int = 0, rows: int = 64, test: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows + test, 6, generator=generator)
        self.y = (self.x @ torch.randn(6, 3, generator=generator)).argmax(1)
        self.rows, self.seed = rows, seed

    def batches(self, step):
        generator = torch.Generator().manual_seed(step.number + 1000 * self.seed)
        rows = torch.randint(self.rows, (step.micro_batches, step.shape.batch), generator=generator)
        return [(self.x[index], self.y[index]) for index in rows]

    def count(self, batch):
        return len(batch[1])

    def move(self, batch, device):
        return tuple(part.to(device) for part in batch)

    def loss(self, model, batch):
        logits, routing = model(batch[0])
        right = (logits.argmax(1) == batch[1]).float().sum()
        total = F.cross_entropy(logits, batch[1], reduction="sum")
        return TaskLoss(total, auxiliary_loss([routing]), [routing], {"accuracy": right})

    @torch.no_grad()
    def evaluate(self, model, config):
        was = model.training
        model.eval()
        x, y = self.x[self.rows :], self.y[self.rows :]
        logits = model(x)[0]
        model.train(was)
        accuracy = (logits.argmax(1) == y).float().mean().item()
        return Evaluation(F.cross_entropy(logits, y).item(), len(y), {"accuracy": accuracy})

    def fingerprint(self):
        return f"blobs {self.seed}"

    def describe(self, folder):
        (folder / "labels.json").write_text(json.dumps(["a", "b", "c"]))


def classifier(seed: int = 3) -> Classifier:
    torch.manual_seed(seed)
    return Classifier()


def test_a_task_that_is_no_language_model_learns_saves_and_names_its_units(tmp_path):
    config = TrainConfig(steps=150, batch=32, log_every=10, optimizer=OptimizerConfig(lr=1e-2))
    report = Trainer(classifier(), Classification(), config, out=tmp_path).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert report.items == 150 * 32 == lines[-2]["rows"]
    assert report.as_dict()["rows"] == report.items
    assert "nats per row" in " ".join(report.lines())
    assert lines[-1]["eval_rows"] == 40
    assert lines[-1]["eval_accuracy"] > 0.7
    assert lines[0]["accuracy"] < lines[-2]["accuracy"] <= 1
    assert json.loads((tmp_path / "model" / "labels.json").read_text()) == ["a", "b", "c"]
    assert report.unmoved == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fifty_steps_are_those_of_a_loop_written_by_hand_bit_for_bit(accumulate):
    """On the language-model task and on another one: the same losses, the same weights."""
    config = TrainConfig(
        steps=50, batch=4, length=12, accumulate=accumulate, clip=0.5, optimizer=OptimizerConfig(lr=3e-3)
    )
    for make, task in (
        (lambda: standin.model(bias=True, bias_rate=0.01), standin.data()),
        (classifier, Classification()),
    ):
        model, losses = make(), []

        class Listen(Hook):
            name = "listen"

            def after_step(self, trainer, losses=losses):
                losses.append(trainer.step_loss)

        trainer = Trainer(model, task, config, hooks=[Listen()])
        trainer.train()
        by_hand = make()
        expected = _by_hand(by_hand, trainer.task, config)
        assert losses == expected
        assert standin.same(standin.weights(model), standin.weights(by_hand))


def _by_hand(model: nn.Module, task: Task, config: TrainConfig) -> list[float]:
    from moesaic.training import Step
    from moesaic.training.config import StageConfig

    optimizers, losses = build_optimizers(model, config.optimizer), []
    model.train()
    for number in range(config.steps):
        shape = StageConfig(1.0, config.batch, config.length)
        batches = task.batches(Step(number, 0, number * config.accumulate, config.accumulate, shape))
        count, value = sum(task.count(batch) for batch in batches), 0.0
        for batch in batches:
            loss = task.loss(model, batch)
            total = loss.total * (1.0 / count)
            if loss.aux is not None:
                total = total + loss.aux * (task.count(batch) / count)
            total.backward()
            value = value + loss.total.detach() / count
        parameters = [p for part in optimizers.parts.values() for group in part.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], config.clip)
        optimizers.set_factor(schedule_factor(config.schedule, number / config.steps, number))
        optimizers.step()
        optimizers.zero_grad()
        end_step(model)
        losses.append(float(value))
    return losses


class Journal(Hook):
    """Writes down what it is told, and carries a number from step to step."""

    name = "journal"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.steps = torch.zeros((), dtype=torch.int64)

    def on_start(self, trainer):
        self.told.append("start")

    def before_step(self, trainer, routings):
        assert trainer.model.head.weight.grad is not None
        assert len(routings) == 1
        self.before = trainer.model.head.weight.detach().clone()
        self.told.append("before")

    def after_step(self, trainer):
        assert trainer.model.head.weight.grad is None
        assert not torch.equal(trainer.model.head.weight, self.before)
        self.steps += 1
        self.told.append("after")

    def on_task(self, trainer, index):
        self.told.append(f"task {index}")

    def on_growth(self, trainer):
        self.told.append("growth")

    def state(self):
        return {"steps": self.steps}

    def load_state(self, trainer, tensors):
        self.steps = tensors["steps"].clone()


def test_hooks_act_around_each_step_and_their_state_is_resumed(tmp_path):
    hook = Journal()
    Trainer(classifier(), Classification(), TrainConfig(steps=2), hooks=[hook]).train()
    assert hook.told == ["start", "before", "after", "before", "after"]
    config = TrainConfig(steps=9, save_every=4)
    with pytest.raises(StopAt.Stop):
        Trainer(classifier(), Classification(), config, out=tmp_path, hooks=[Journal()], observers=[StopAt(6)]).train()
    again = Journal()
    Trainer(classifier(), Classification(), config, out=tmp_path, hooks=[again]).train(resume=True)
    assert int(again.steps) == 9
    assert again.told.count("after") == 5
    with pytest.raises(ValueError, match=r"state of the hooks \['journal'\], this run has \[\]"):
        Trainer(classifier(), Classification(), config, out=tmp_path).train(resume=True)
    with pytest.raises(ValueError, match="two hooks are named 'journal'"):
        Trainer(classifier(), Classification(), config, hooks=[Journal(), Journal()])


class Widen(Hook):
    """Doubles the head's input after step 3, keeping the function."""

    name = "widen"

    def __init__(self) -> None:
        self.wide = False

    def grow(self, trainer):
        model = trainer.model
        with torch.no_grad():
            old = model.head
            model.head = nn.Linear(8, 3)
            model.head.weight.copy_(old.weight)
            model.head.bias.copy_(old.bias)
            model.extra = nn.Parameter(torch.zeros(3))
        self.wide = True
        trainer.model_changed()

    def after_step(self, trainer):
        if trainer.state.position.step == 3:
            self.grow(trainer)

    def state(self):
        return {"wide": torch.tensor(self.wide)}

    def load_state(self, trainer, tensors):
        if bool(tensors["wide"]) and not self.wide:
            self.grow(trainer)


class Growing(Classification):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        extra = getattr(model, "extra", None)
        return (
            found
            if extra is None
            else TaskLoss(found.total + extra.square().sum() + extra.sum(), found.aux, found.routings)
        )


def test_a_model_that_grows_in_training_keeps_its_optimizer_state_and_is_resumed_bit_for_bit(tmp_path):
    config = TrainConfig(steps=8, save_every=5)
    journal, model = Journal(), classifier()
    trainer = Trainer(model, Growing(), config, out=tmp_path / "whole", hooks=[Widen(), journal])
    trainer.train()
    assert journal.told.count("growth") == 1
    adamw = trainer.state.optimizers.parts["adamw"]
    assert int(adamw.state[model.embed.weight]["step"]) == 8  # went along
    assert int(adamw.state[model.head.weight]["step"]) == 5  # another object: started anew
    assert int(adamw.state[model.extra]["step"]) == 5
    cut = tmp_path / "cut"
    with pytest.raises(StopAt.Stop):
        Trainer(classifier(), Growing(), config, out=cut, hooks=[Widen(), Journal()], observers=[StopAt(6)]).train()
    again = classifier()
    Trainer(again, Growing(), config, out=cut, hooks=[Widen(), Journal()]).train(resume=True)
    assert standin.same(standin.weights(model), standin.weights(again))
    first, second = (latest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "cut"))
    assert standin.same(first.tensors("optimizer"), second.tensors("optimizer"))


class Scripted(Classification):
    """Held-out losses as a script says, one an evaluation."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def evaluate(self, model, config):
        self.seen = getattr(self, "seen", -1) + 1
        return Evaluation(self.losses[min(self.seen, len(self.losses) - 1)], 1)


def test_early_stopping_ends_the_run_and_restores_the_best_weights(tmp_path):
    kept = {}

    class Keep(Hook):
        name = "keep"

        def after_step(self, trainer):
            kept[trainer.state.position.step] = standin.weights(trainer.model)

    config = TrainConfig(steps=100, eval_every=2, early_stopping=EarlyStoppingConfig(patience=2))
    model = classifier()
    report = Trainer(model, Scripted([3.0, 2.0, 2.5, 2.1]), config, out=tmp_path, hooks=[Keep()]).train()
    assert report.steps == 8  # best at step 4, worse at 6 and 8
    assert report.best_eval == 2.0
    assert standin.same(standin.weights(model), kept[4])
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(saved["head.weight"], kept[4]["head.weight"])
    raw = latest_checkpoint(tmp_path / "checkpoints").tensors("model")
    assert torch.equal(raw["head.weight"], kept[8]["head.weight"])


def test_early_stopping_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="early_stopping needs evaluations: set eval_every"):
        TrainConfig(steps=3, early_stopping=EarlyStoppingConfig())
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        EarlyStoppingConfig(patience=0)

    class Blind(Classification):
        def evaluate(self, model, config):
            return None

    config = TrainConfig(steps=3, eval_every=1, early_stopping=EarlyStoppingConfig())
    with pytest.raises(ValueError, match="the task has none to evaluate on"):
        Trainer(classifier(), Blind(), config).train()


def test_a_stream_of_tasks_tells_its_hooks_and_goes_on_where_it_was(tmp_path):
    config = TrainConfig(steps=4, save_every=2)
    tasks = [Classification(seed) for seed in range(3)]
    hook, model, seen = Journal(), classifier(), []
    reports = train_stream(model, tasks, config, hooks=[hook], after_task=lambda i, m: seen.append(i))
    assert [report.steps for report in reports] == [4, 4, 4]
    assert [told for told in hook.told if told.startswith("task")] == ["task 0", "task 1", "task 2"]
    assert seen == [0, 1, 2]
    assert int(hook.steps) == 12

    class StopLater(StopAt):
        def on_start(self, step, steps, seconds):
            self.runs = getattr(self, "runs", 0) + 1

        def on_step(self, step, progress):
            if self.runs == 2:
                super().on_step(step, progress)

    with pytest.raises(StopAt.Stop):
        train_stream(classifier(), tasks, config, out=tmp_path, hooks=[Journal()], observers=[StopLater(3)])
    again, other = Journal(), classifier(9)
    train_stream(other, tasks, config, out=tmp_path, hooks=[again])
    assert standin.same(standin.weights(model), standin.weights(other))
    assert int(again.steps) == 12
    with pytest.raises(ValueError, match="tasks is empty"):
        train_stream(model, [], config)


def test_optimizers_and_schedule_may_be_the_users_own():
    def sgd(model):
        named = {p: name for name, p in model.named_parameters()}
        return Optimizers({"sgd": torch.optim.SGD(list(named), lr=0.5)}, named)

    trainer = Trainer(classifier(), Classification(), TrainConfig(steps=3), optimizers=sgd, schedule=lambda p, s: s / 2)
    trainer.train()
    assert trainer.state.optimizers.parts["sgd"].param_groups[0]["lr"] == 0.5
