"""One file a paper: the claim, the arms, the verdict. ``base`` says what an experiment is, ``run`` runs one."""

from moesaic.experiments.base import Arm, Experiment, Metric, Outcome, Row, Size, on
from moesaic.experiments.verdict import Criterion

__all__ = ["Arm", "Criterion", "Experiment", "Metric", "Outcome", "Row", "Size", "on"]
