"""A small experiment for the framework's own tests; ``measure`` is importable, so worker processes can run it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from moesaic.experiments import Arm, Criterion, Experiment, Metric, Outcome


def measure(settings: Mapping[str, Any], seed: int) -> Outcome:
    value = settings["base"] + settings["shift"] + settings["noise"] * ((seed * 7919) % 5 - 2)
    return Outcome({"loss": value}, {"trace": [value, value / 2]})


def toy(**changes: Any) -> Experiment:
    fields: dict[str, Any] = {
        "slug": "toy",
        "claim": "Ours is below the baseline.",
        "settings": {"base": 1.0, "noise": 0.01},
        "arms": (Arm("ours", {"shift": -0.2}), Arm("baseline", {"shift": 0.0})),
        "seeds": (0, 1, 2),
        "metrics": (Metric("loss", "loss (nats)", "lower"),),
        "criteria": (
            Criterion(
                "better",
                "ours below the baseline",
                ("ours", "baseline"),
                lambda m: m["ours"]["loss"] - m["baseline"]["loss"],
                "<",
                0.0,
            ),
        ),
        "measure": measure,
        "quick": {"base": 2.0},
    }
    return Experiment(**{**fields, **changes})


def places(settings: Mapping[str, Any], seed: int) -> Outcome:
    """On data set b the loss is 1 higher."""
    outcome = measure(settings, seed)
    return Outcome({"loss": outcome.metrics["loss"] + (settings["dataset"] == "b")}, outcome.curves)


def sleepy(settings: Mapping[str, Any], seed: int) -> Outcome:
    """Waits, fails or dies as its arm says."""
    time.sleep(settings.get("seconds", 0.0))
    if settings.get("fails"):
        raise RuntimeError("failed as told")
    if settings.get("dies"):
        os._exit(9)
    return measure(settings, seed)
