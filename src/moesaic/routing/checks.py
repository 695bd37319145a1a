"""Switch for content checks: shapes are always checked, contents where it is cheap enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_forced: ContextVar[bool | None] = ContextVar("moesaic_checks", default=None)


@contextmanager
def checks(on: bool) -> Iterator[None]:
    """Turn content checks (ids in range, empty slots weightless, values finite) on or off inside the block.

    Without it they run on the CPU and are left out on accelerators, where reading a value waits for the device, and
    inside ``torch.compile``.

    Args:
        on: whether to check.
    """
    token = _forced.set(on)
    try:
        yield
    finally:
        _forced.reset(token)


def checking(tensor: torch.Tensor) -> bool:
    """Whether contents of ``tensor`` are to be checked now."""
    if torch.compiler.is_compiling():
        return False
    forced = _forced.get()
    return tensor.device.type == "cpu" if forced is None else forced
