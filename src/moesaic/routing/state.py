"""State that moves once per optimizer step, whatever recomputation, evaluation or accumulation do."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn


def in_recompute() -> bool:
    """Whether this forward runs inside a backward pass: the second computation of a checkpointed block.

    Counters, recorders and running bases move in the first pass only.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class StepState(nn.Module):
    """A module with state that is gathered in forward and applied by :func:`end_step` once per optimizer step.

    Subclasses gather in :meth:`observe`-like methods when :meth:`counting` is true, and override :meth:`end_step`.
    Parameters and buffers stay in float32 (float64 if made so) through ``.to(torch.bfloat16)`` and ``.half()``: a bias or a
    threshold that moves in small steps would stand still in bf16, and bf16 scores flip near ties.
    """

    keeps_float32: ClassVar[bool] = True

    def counting(self) -> bool:
        """Whether what this forward sees is to be counted: in training mode, in the first pass."""
        return self.training and not in_recompute()

    def end_step(self) -> None:
        """Apply what was gathered since the last call; called once per optimizer step on every rank."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StepState:
        if not self.keeps_float32:
            return super()._apply(fn, recurse)  # type: ignore[no-any-return]
        own = [
            (store, name, value)
            for store in (self._parameters, self._buffers)
            for name, value in store.items()
            if value is not None
        ]
        before = [(store, name, value.data, value.dtype) for store, name, value in own]
        super()._apply(fn, recurse)
        for store, name, data, dtype in before:
            now = store[name]
            assert now is not None
            if (
                dtype.is_floating_point
                and torch.finfo(now.dtype).bits < torch.finfo(dtype).bits
                and torch.finfo(now.dtype).bits < 32
            ):
                kept = data.to(device=now.device)
                if isinstance(now, nn.Parameter):
                    now.data = kept
                else:
                    store[name] = kept
        return self


def end_step(model: nn.Module) -> None:
    """Apply, once per optimizer step, the state that every part of ``model`` gathered in forward.

    Call it after ``optimizer.step()``, on every rank (parts reduce what they gathered over the default process group).

    Args:
        model: any module; parts that keep step state are found inside it. A part shared by several layers is called once.
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
