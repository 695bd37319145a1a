"""A model trained on one task after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from moesaic.training.config import TrainConfig
from moesaic.training.hooks import Hook
from moesaic.training.report import TrainReport
from moesaic.training.run_files import checkpoints_of
from moesaic.training.task import Task
from moesaic.training.trainer import Trainer


def train_stream(
    model: nn.Module,
    tasks: Sequence[Task[Any]],
    config: TrainConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    hooks: Sequence[Hook] = (),
    after_task: Callable[[int, nn.Module], None] | None = None,
    **options: Any,
) -> list[TrainReport]:
    """Train ``model`` on each task of a stream in turn, each a run of its own with fresh optimizers.

    Hooks stay from task to task and hear :meth:`Hook.on_task` before each. With ``out`` task i lies in
    ``out/task-00i``; a call that finds finished and begun tasks there goes on where it was.

    Args:
        model: trained in place.
        tasks: in order.
        config: of each task's run.
        out: folder of the stream; None writes nothing.
        hooks: what methods add.
        after_task: ``(index, model)``, called after each task that was trained or found finished, for the accuracy
            matrix.
        **options: further arguments of :class:`Trainer`.

    Returns:
        The report of each task.

    Raises:
        ValueError: no task; see :class:`Trainer`.
    """
    if not tasks:
        raise ValueError("tasks is empty: a stream needs at least one task")
    reports = []
    for index, task in enumerate(tasks):
        folder = None if out is None else Path(out) / f"task-{index:03d}"
        trainer = Trainer(model, task, config, out=folder, hooks=hooks, **options)
        for hook in hooks:
            hook.on_task(trainer, index)
        # A finished run takes no further step: resuming it puts weights and hooks where its last checkpoint has them.
        begun = folder is not None and any(checkpoints_of(folder).glob("step-*"))
        reports.append(trainer.train(resume=begun))
        if after_task is not None:
            after_task(index, model)
    return reports
