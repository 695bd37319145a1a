"""Learning rate as a factor of progress, by steps or by wall-clock."""

from __future__ import annotations

import math

from moesaic.training.config import ScheduleConfig


def schedule_factor(config: ScheduleConfig, progress: float, step: int) -> float:
    r"""Factor on every group's learning rate.

    With progress :math:`p`, final factor :math:`f` and decay fraction :math:`d`: cosine is
    :math:`f + (1 - f)(1 + \cos \pi p) / 2`; linear :math:`f + (1 - f)(1 - p)`; wsd (arXiv:2404.06395) is 1 until
    :math:`1 - d` and then falls linearly to :math:`f`. Warmup multiplies by :math:`\min(1, (s + 1) / w)` at step
    :math:`s`.

    Args:
        config: the schedule.
        progress: share of the run that is over, in [0, 1]; values outside are clamped.
        step: steps taken before this one.
    """
    progress = min(max(progress, 0.0), 1.0)
    if config.kind == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    elif config.kind == "linear":
        share = 1 - progress
    elif config.kind == "wsd":
        share = min(1.0, (1 - progress) / config.decay)
    else:
        share = 1.0
    factor = config.final + (1 - config.final) * share if config.kind != "constant" else 1.0
    return factor * min(1.0, (step + 1) / config.warmup) if config.warmup else factor
