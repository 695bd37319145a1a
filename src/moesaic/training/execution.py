"""How a step is computed: device, precision, compilation, and the ranks that share it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.training.config import TrainConfig
from moesaic.training.task import Task, TaskLoss

logger = logging.getLogger("moesaic.training")


class Execution:
    """Runs a task's loss on one process.

    The one place where training over many processes enters: a subclass shards the model in :meth:`prepare` and answers
    :meth:`over_ranks` and :attr:`writes` for its ranks; the trainer asks nothing else about them.

    Args:
        model: trained in place.
        config: of the run.

    Attributes:
        notes: what was done otherwise than asked, for the report.
        writes: whether this process writes files and tells observers.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.model = model
        self.config = config
        self.device = next(model.parameters()).device
        self.notes: list[str] = []
        self.writes = True
        self._forward: nn.Module = model

    def prepare(self) -> None:
        """Put the model into training mode, with recomputation and compilation as configured.

        Raises:
            ValueError: recomputation asked of a model that cannot.
        """
        self.model.train()
        if self.config.checkpointing:
            enable = getattr(self.model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ValueError(f"checkpointing is true and {type(self.model).__name__} cannot recompute activations")
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._forward = torch.compile(self.model) if self.config.compile else self.model  # type: ignore[assignment]

    def loss(self, task: Task[Any], batch: Any) -> TaskLoss:
        """The task's loss under autocast, compiled where that works."""
        with self.autocast():
            try:
                return task.loss(self._forward, batch)
            except Exception as error:
                if self._forward is self.model or not _is_compiler_error(error):
                    raise
                self.notes.append(f"ran without torch.compile: {str(error).splitlines()[0]}")
                logger.warning(self.notes[-1])
                self._forward = self.model
                return task.loss(self._forward, batch)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The configured precision."""
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def over_ranks(self, value: Tensor | int) -> Tensor | int:
        """Sum of ``value`` over the processes that share a step; itself on one."""
        return value


def _is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed for want of a working C++ compiler, which shows at the first call."""
    seen: BaseException | None = error
    while seen is not None:
        if "InvalidCxxCompiler" in type(seen).__name__ or "InvalidCxxCompiler" in str(seen):
            return True
        seen = seen.__cause__ or getattr(seen, "inner_exception", None)
    return False
