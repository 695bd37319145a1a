"""Where a run broke: the first layer whose output is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.routing import Routing, checks
from moesaic.training.task import Task


class NonFiniteError(RuntimeError):
    """Training stopped because a loss or gradient was not finite.

    Attributes:
        step: optimizer steps taken before.
        layer: module path of the first layer whose output is not finite, or the first parameter whose gradient is not.
        checkpoint: the last good checkpoint, or None.
    """

    def __init__(self, step: int, what: str, layer: str, checkpoint: Path | None) -> None:
        self.step = step
        self.layer = layer
        self.checkpoint = checkpoint
        back = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written yet"
        super().__init__(
            f"{what} at step {step + 1}; {layer}; {back}. Lower the learning rate or clip, and resume from it"
        )


@torch.no_grad()
def first_non_finite_layer(model: nn.Module, task: Task[Any], batch: Any) -> str | None:
    """Run the batch again and name the innermost module that is first to give NaN or inf; None when all is finite."""
    bad_weights = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and any(not bool(torch.isfinite(value).all()) for value in _floats(output)):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with checks(False):
            task.loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        weights = f" (its weights are not finite: {bad_weights[0]})" if bad_weights else ""
        return f"first layer whose output is not finite: {found[0]}{weights}"
    return f"weights are not finite: {bad_weights[0]}" if bad_weights else None


def first_non_finite_gradient(model: nn.Module) -> str:
    """Name of the first parameter, in the model's order, whose gradient holds NaN or inf."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"first parameter whose gradient is not finite: {name}"
    return "every single gradient is finite, their norm is not"


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Routing):
        yield value.weights_TK
        if value.logits_TE is not None:
            yield value.logits_TE.masked_fill(value.logits_TE == -torch.inf, 0.0)  # experts that are not allowed
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)
