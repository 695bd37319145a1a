"""What every command shares: JSON on stdout, progress on stderr, one-line errors, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def stderr_console() -> Console:
    """Console for progress and notes; quiet markup when stderr is not a terminal."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """Console for results."""
    return Console(highlight=False)


def emit(result: Mapping[str, Any], as_json: bool) -> None:
    """Print ``result`` as one JSON document on stdout when ``as_json``; else the command prints its own text."""
    if as_json:
        json.dump(result, sys.stdout, indent=1, default=_plain, allow_nan=False)
        sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def apply_threads_and_seed(threads: int | None, seed: int | None = None) -> None:
    """Set torch's thread count and seed from ``--threads`` and ``--seed``.

    Raises:
        ValueError: threads below 1.
    """
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)
