"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    r"""Average :math:`\bar w \leftarrow d \, \bar w + (1 - d) \, w` of trainable parameters, kept in float32 at least.

    Buffers (selection biases, thresholds) are not averaged: an evaluation uses the current ones.

    Args:
        model: whose parameters are averaged; the average starts at their present values.
        decay: :math:`d` in (0, 1), for one :meth:`update`.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: _wide(p).clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        now = [_wide(p) for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        own = {name: p.data for name, p in self._parameters.items()}
        try:
            for name, p in self._parameters.items():
                p.data = self.average[name].to(p.dtype)
            yield
        finally:
            for name, p in self._parameters.items():
                p.data = own[name]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back a saved average.

        Raises:
            ValueError: names or shapes that are not this model's.
        """
        if set(tensors) != set(self.average):
            different = sorted(set(tensors) ^ set(self.average))
            raise ValueError(f"the saved average does not fit the model: {different[:5]}")
        for name, value in tensors.items():
            self.average[name].copy_(value)


def _wide(parameter: nn.Parameter) -> Tensor:
    """Float32 at least: a bf16 average would stand still."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
