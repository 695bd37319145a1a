"""Runs that ship with the package, as the YAML files that ``moesaic train`` takes."""

from __future__ import annotations

from pathlib import Path

RECIPES = ("dense", "moe")


def recipe(name: str) -> Path:
    """Path of a shipped config file.

    Args:
        name: ``"moe"`` is what ``moesaic quickstart`` trains; ``"dense"`` the best dense model of the same active size.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in RECIPES:
        raise ValueError(f"name must be one of {RECIPES}, got {name!r}")
    return Path(__file__).parent / f"{name}.yaml"
