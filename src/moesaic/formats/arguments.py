"""Arguments that are counts: refused at the door unless they are whole numbers in range."""

from __future__ import annotations

import numbers
from typing import Any


def check_count(name: str, value: Any, least: int = 1, most: int | None = None, limit: str = "") -> int:
    """``value`` as an int.

    A float is refused even where it is whole, and so is a truth value: both are slips (``2.5`` experts, ``True`` for an
    option next to it) that otherwise show much later, or never.

    Args:
        name: of the argument, for the message.
        value: an int, or an integer of numpy.
        least: smallest that is allowed.
        most: largest that is allowed; None for no limit.
        limit: how the message names ``most``, such as ``"num_experts = 8"``.

    Raises:
        ValueError: naming argument, value and what is allowed.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be an integer, {_range(least, most, limit)}, got {value!r}")
        value = int(value)
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {_range(least, most, limit)}, got {value}")
    return int(value)


def _range(least: int, most: int | None, limit: str) -> str:
    return f"at least {least}" if most is None else f"between {least} and {limit or most}"
