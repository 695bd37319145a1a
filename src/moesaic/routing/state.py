"""State that moves once per optimizer step, whatever recomputation, evaluation or accumulation do."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from moesaic.formats.arguments import check_count


def in_recompute() -> bool:
    """Whether this forward runs inside a backward pass: the second computation of a checkpointed block.

    Counters, recorders and running bases move in the first pass only.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class StepState(nn.Module):
    """A module with state that is gathered in forward and applied by :func:`end_step` once per optimizer step.

    Subclasses gather in :meth:`observe`-like methods when :meth:`counting` is true (a :class:`StepCounter` holds what
    they gather), and override :meth:`end_step`. Parameters and buffers, those of submodules included, stay in float32
    (float64 if made so) through ``.to(torch.bfloat16)`` and ``.half()``: a bias or a threshold that moves in small
    steps would stand still in bf16, and bf16 scores flip near ties.
    """

    keeps_float32: ClassVar[bool] = True

    def counting(self) -> bool:
        """Whether what this forward sees is to be counted: in training mode, in the first pass."""
        return self.training and not in_recompute()

    def end_step(self) -> None:
        """Apply what was gathered since the last call; called once per optimizer step on every rank."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StepState:
        if not self.keeps_float32:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        modules = list(self.modules()) if recurse else [self]
        before = [
            (module, name, value.data)
            for module in modules
            for store in (module._parameters, module._buffers)
            for name, value in store.items()
            if value is not None and value.dtype in (torch.float32, torch.float64)
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, data in before:
            now = getattr(module, name)
            if now.dtype.is_floating_point and torch.finfo(now.dtype).bits < 32:
                kept = data.to(device=now.device)
                if isinstance(now, nn.Parameter):
                    _restore(now, kept)
                else:
                    module._buffers[name] = kept
        return self


def _restore(parameter: nn.Parameter, data: Tensor) -> None:
    grad = parameter.grad
    parameter.grad = None  # a gradient must have the dtype of its parameter at every moment
    parameter.data = data
    if grad is not None:
        parameter.grad = grad.to(data.dtype)


class StepCounter:
    """Integer sums gathered over the micro-batches of a step, then read once, summed over all ranks.

    A plain attribute of its module and no buffer: a model built on the meta device has no garbage in it, a wrapper that
    broadcasts buffers does not overwrite one rank's counts with another's, and checkpoints, written between steps, do
    not hold it.

    Args:
        size: how many numbers.
    """

    def __init__(self, size: int) -> None:
        self.size = check_count("size", size)
        self._sum: Tensor | None = None

    def add(self, counts: Tensor) -> None:
        """Add ``counts`` (size,) int64."""
        counts = counts.detach()
        self._sum = counts.clone() if self._sum is None else self._sum.to(counts.device) + counts

    def drain(self, device: torch.device) -> Tensor:
        """The sum over micro-batches and ranks (size,) int64, on ``device``; starts again from 0.

        Every rank must call it, also one that has counted nothing.
        """
        total = torch.zeros(self.size, dtype=torch.int64) if self._sum is None else self._sum
        self._sum = None
        return reduce_sum(total.to(device))


@torch.no_grad()
def end_step(model: nn.Module) -> None:
    """Apply, once per optimizer step, the state that every part of ``model`` gathered in forward.

    Call it after ``optimizer.step()``, on every rank (parts reduce what they gathered over the default process group).

    Args:
        model: any module; parts with step state are found inside it. A part shared by several layers is called once.
    """
    for module in model.modules():
        if isinstance(module, StepState):
            module.end_step()


def reduce_sum(value: Tensor) -> Tensor:
    """Sum of ``value`` over the ranks of the default process group; itself without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value
