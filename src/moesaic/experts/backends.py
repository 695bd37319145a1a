"""How a bank of feed-forward experts is computed: the one place that chooses, by device, dtype and rows.

``reference`` goes through the open steps ``rows`` -> ``outputs`` -> ``combine`` with plain differentiable operations.
``fused`` goes expert by expert with a backward of its own (:mod:`moesaic.experts.fused`); equal to the reference within
rounding. Inside ``torch.compile`` the reference is used: the compiler sees plain operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from moesaic.routing import Routing

BACKENDS = ("reference", "fused")

_forced: ContextVar[str | None] = ContextVar("moesaic_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute all banks inside the block by one backend (``"reference"`` can be differentiated twice).

    Args:
        name: one of ``BACKENDS``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def chosen_backend(x_TD: Tensor, routing: Routing | None = None) -> str:
    """Name of the backend for these rows."""
    if torch.compiler.is_compiling():
        return "reference"
    return _forced.get() or "fused"
