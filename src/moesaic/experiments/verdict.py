"""Criteria with thresholds fixed beforehand, judged from per-seed rows."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Means = Mapping[str, Mapping[str, float]]
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
MET, NOT_MET, INCONCLUSIVE, NOT_MEASURED = "met", "not met", "inconclusive", "not measured"
# A distance from the threshold below this many standard errors is no distance.
STANDARD_ERRORS = 2.0


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One sentence of "reproduced if": ``value comparison threshold``.

    Args:
        name: short, unique in the experiment.
        statement: the sentence, for readers.
        arms: arms that ``value`` reads, ``on(arm, dataset)`` for one on a single data set; the criterion is judged on
            the seeds that all of them have.
        value: ``(means) -> number`` from arm -> metric -> mean over seeds.
        comparison: ``"<"``, ``"<="``, ``">"`` or ``">="``.
        threshold: from the specification, never from the rows.

    Raises:
        ValueError: an unknown comparison, no arms.
    """

    name: str
    statement: str
    arms: tuple[str, ...]
    value: Callable[[Means], float]
    comparison: str
    threshold: float

    def __post_init__(self) -> None:
        if self.comparison not in COMPARISONS:
            raise ValueError(f"comparison must be one of {list(COMPARISONS)}, got {self.comparison!r} in {self.name!r}")
        if not self.arms:
            raise ValueError(f"criterion {self.name!r} must name the arms that it reads")


def judge(
    criterion: Criterion,
    per_seed: Mapping[int, Means],
    *,
    deterministic: bool = False,
) -> dict[str, Any]:
    r"""The verdict on one criterion.

    The value is that of the means over seeds; its standard error comes from leaving out one seed at a time,

    .. math:: s^2 = \tfrac{n-1}{n} \sum_i (v_{-i} - \bar v)^2,

    which for a difference of two arms is the usual paired standard error. Nearer to the threshold than
    ``STANDARD_ERRORS`` of them the answer is "inconclusive": the spread is larger than the effect. Where arms have no
    rows, or one seed leaves the spread unknown, the answer is "not measured".

    Args:
        criterion: what is asked.
        per_seed: seed -> arm -> metric -> number.
        deterministic: the numbers do not depend on the seed: one is enough, and there is no spread.

    Returns:
        ``name, statement, comparison, threshold, value, standard_error, per_seed, status, reason``; value None without
        a seed that has all arms, reason the words for "not measured" and else None.
    """
    seeds = [seed for seed in sorted(per_seed) if all(arm in per_seed[seed] for arm in criterion.arms)]
    found = {
        "name": criterion.name,
        "statement": criterion.statement,
        "comparison": criterion.comparison,
        "threshold": criterion.threshold,
        "value": None,
        "standard_error": None,
        "per_seed": {str(seed): criterion.value(per_seed[seed]) for seed in seeds},
        "status": NOT_MEASURED,
        "reason": None,
    }
    if not seeds:
        found["reason"] = _lacking(criterion, per_seed)
        return found
    value = criterion.value(_mean([per_seed[seed] for seed in seeds], criterion.arms))
    found["value"] = value
    if len(seeds) == 1 and not deterministic:
        found["reason"] = "one seed has no spread"
        return found
    error = 0.0
    if len(seeds) > 1:
        without = [
            criterion.value(_mean([per_seed[other] for other in seeds if other != seed], criterion.arms))
            for seed in seeds
        ]
        centre = math.fsum(without) / len(without)
        error = math.sqrt((len(seeds) - 1) / len(seeds) * math.fsum((v - centre) ** 2 for v in without))
    found["standard_error"] = error
    # Rounding leaves about 1e-17 of "spread" between equal numbers.
    if error > 1e-12 and abs(value - criterion.threshold) <= STANDARD_ERRORS * error:
        found["status"] = INCONCLUSIVE
        return found
    found["status"] = MET if COMPARISONS[criterion.comparison](value, criterion.threshold) else NOT_MET
    return found


def _lacking(criterion: Criterion, per_seed: Mapping[int, Means]) -> str:
    missing = [arm for arm in criterion.arms if not any(arm in entry for entry in per_seed.values())]
    return f"no rows of {', '.join(missing)}" if missing else f"no seed has all of {', '.join(criterion.arms)}"


def _mean(rows: Sequence[Means], arms: Sequence[str]) -> Means:
    return {arm: {name: math.fsum(row[arm][name] for row in rows) / len(rows) for name in rows[0][arm]} for arm in arms}
