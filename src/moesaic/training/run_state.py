"""Everything a run needs to go on exactly where it was: gathered into a checkpoint, put back from one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.formats.checkpoint import Checkpoint, unshared
from moesaic.routing import StepState
from moesaic.training.averaging import WeightAverage
from moesaic.training.config import TrainConfig
from moesaic.training.optimizers import Optimizers
from moesaic.training.statistics import ExpertMovement, LoadTable

# What may differ between a run and its resumption: how long, how often and where; nothing that changes a step. A longer
# ``steps`` stretches the schedule from there on.
_MAY_CHANGE = frozenset({"steps", "seconds", "log_every", "eval_every", "eval_batches", "save_every", "keep"})


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        stage: index of the batch-shape stage.
        stage_start: step at which it began; batches are numbered from there.
        items: tokens, rows ... trained on.
        elapsed: seconds of training, those before a resume included.
        loss_sum, loss_steps: since the last logged line.
        last_loss: mean loss of the last logged line, None before the first.
        eval_loss, best_eval: of the last and of the best evaluation.
        worse: evaluations since the last one that counted as better.
        failed_saves: checkpoints that could not be written.
    """

    step: int = 0
    stage: int = 0
    stage_start: int = 0
    items: int = 0
    elapsed: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    last_loss: float | None = None
    eval_loss: float | None = None
    best_eval: float | None = None
    worse: int = 0
    failed_saves: list[str] = field(default_factory=list)


@dataclass
class RunState:
    """All moving parts of a run.

    Attributes:
        model, optimizers, average, loads, movement: see their classes; ``average`` is None until it starts.
        position: where the run stands.
        best: weights of the best evaluation where early stopping will restore them; empty otherwise.
    """

    model: nn.Module
    optimizers: Optimizers
    loads: LoadTable
    movement: ExpertMovement
    position: Position = field(default_factory=Position)
    average: WeightAverage | None = None
    best: dict[str, Tensor] = field(default_factory=dict)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for :func:`moesaic.formats.checkpoint.save_checkpoint`, one entry a file.

        Raises:
            FloatingPointError: weights that are not finite; such a checkpoint would replace a good one.
        """
        weights = self.model.state_dict()
        for name, value in weights.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FloatingPointError(f"weights are not finite: {name}")
        return {
            "model": unshared(weights),
            "optimizer": self.optimizers.state_tensors(),
            "average": {} if self.average is None else self.average.average,
            "state": {**_hidden_buffers(self.model), **_random_states()},
            "routing": self.loads.tensors(),
            "start": self.movement.start,
            "best": self.best,
        }

    def meta(self, config: TrainConfig, data: str, metrics_offset: int) -> dict[str, Any]:
        """JSON beside the tensors."""
        return {
            "position": dataclasses.asdict(self.position),
            "config": dataclasses.asdict(config),
            "data": data,
            "metrics_offset": metrics_offset,
            "averaging": self.average is not None,
            "model": _model_config(self.model),
        }

    def restore(self, checkpoint: Checkpoint, new_average: Callable[[], WeightAverage]) -> None:
        """Put everything back.

        Args:
            checkpoint: verified.
            new_average: makes an average, called when the checkpoint has one.

        Raises:
            ValueError: tensors that do not fit this model.
        """
        load_weights(self.model, checkpoint.tensors("model"), str(checkpoint.path / "model.safetensors"))
        self.optimizers.load_state_tensors(checkpoint.tensors("optimizer"))
        if checkpoint.meta["averaging"]:
            self.average = new_average()
            self.average.load(checkpoint.tensors("average"))
        state = checkpoint.tensors("state")
        _restore_hidden_buffers(self.model, state)
        _restore_random_states(state)
        self.loads.load(checkpoint.tensors("routing"))
        start = checkpoint.tensors("start")
        start.pop("__empty__", None)
        self.movement.start = start
        self.best = {name: value for name, value in checkpoint.tensors("best").items() if name != "__empty__"}
        self.position = Position(**checkpoint.meta["position"])


def check_same_run(checkpoint: Checkpoint, model: nn.Module, config: TrainConfig, data: str) -> None:
    """Refuse to go on with another text, another model or other training settings.

    Raises:
        ValueError: what differs, with both values.
    """
    if checkpoint.meta["data"] != data:
        raise ValueError(
            f"{checkpoint.path} was trained on other tokens (fingerprint {checkpoint.meta['data']}, now {data}):"
            " resume with the same text and tokenizer"
        )
    built, saved = _model_config(model), checkpoint.meta["model"]
    for key in sorted(set(built) | set(saved)):
        if built.get(key) != saved.get(key):
            raise ValueError(
                f"model.{key} is {built.get(key)!r}, {checkpoint.path} holds a model with {saved.get(key)!r}:"
                " resume with the same model"
            )
    now, then = dataclasses.asdict(config), checkpoint.meta["config"]
    for key, value in now.items():
        if key not in _MAY_CHANGE and _plain(value) != _plain(then.get(key)):
            raise ValueError(
                f"train.{key} is {value!r}, {checkpoint.path} was trained with {then.get(key)!r}: resume with the same"
                f" value (only {sorted(_MAY_CHANGE)} may change)"
            )


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict in which tied tensors are stored once.

    Raises:
        ValueError: missing, unexpected or wrongly shaped tensors, named.
    """
    own = model.state_dict()
    tied = set(own) - set(unshared(own))
    missing = sorted(set(own) - set(tensors) - tied)
    unexpected = sorted(set(tensors) - set(own) - {"__empty__"})
    shapes = sorted(name for name in set(own) & set(tensors) if own[name].shape != tensors[name].shape)
    for problem, names in (("lacks", missing), ("has unknown", unexpected), ("has other shapes of", shapes)):
        if names:
            raise ValueError(f"{source} {problem} {len(names)} tensors of this model, such as {names[:3]}")
    with torch.no_grad():
        for name, value in tensors.items():
            if name in own:
                own[name].copy_(value)


def _hidden_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of step state that a state dict leaves out."""
    return {
        f"buffer/{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        if isinstance(module, StepState)
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


def _restore_hidden_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    now = _hidden_buffers(model)
    saved = {name for name in tensors if name.startswith("buffer/")}
    if saved != set(now):
        raise ValueError(f"the checkpoint's step state does not fit the model: {sorted(saved ^ set(now))[:5]}")
    for name, buffer in now.items():
        buffer.copy_(tensors[name])


def _model_config(model: nn.Module) -> dict[str, Any]:
    """What the model was built with, where it says so."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {key: value for key, value in values.items() if key not in ("transformers_version", "_name_or_path")}


def _random_states() -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON keeps them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
