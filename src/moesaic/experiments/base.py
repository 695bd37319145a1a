"""What an experiment is: arms, seeds, a function that measures one of them, and criteria that judge the rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.experiments.verdict import Criterion


@dataclasses.dataclass(frozen=True)
class Arm:
    """One line of the table: the method, one of its variants, or a baseline.

    Args:
        name: as the table prints it.
        settings: what this arm changes in the settings of the experiment; JSON values.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One column of the table.

    Args:
        name: key in the rows.
        label: heading, with the unit.
        better: ``"lower"``, ``"higher"`` or ``""`` where neither is better.
        digits: decimals printed.
        optional: arms may leave it out.
    """

    name: str
    label: str
    better: str = ""
    digits: int = 3
    optional: bool = False

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher", ""):
            raise ValueError(f"better must be 'lower', 'higher' or '', got {self.better!r} for metric {self.name}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one arm measured with one seed.

    Args:
        metrics: name -> finite number; every metric of the experiment (optional ones where they mean something).
        curves: name -> numbers over time, layers ...: kept in the row for plots, never averaged by the framework.
    """

    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """A stored measurement: one arm, one seed."""

    arm: str
    seed: int
    fingerprint: str
    seconds: float
    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]


Measure = Callable[[Mapping[str, Any], int], Outcome]
Plot = Callable[[Sequence[Row], Path], None]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The reproduction of one paper's claim at a size that a laptop can run.

    A module ``moesaic.experiments.SLUG`` (with underscores) holds one as ``EXPERIMENT``; the catalogue names it.

    Args:
        slug: name of the system in the catalogue.
        claim: the paper's claim in a sentence or two, as this experiment puts it to the test.
        settings: everything that defines the measurement; JSON values. With the arm's they make a row's fingerprint.
        arms: the method, its variants and every baseline.
        seeds: what a full run uses.
        metrics: columns of the table.
        criteria: what "reproduced" means; see :class:`moesaic.experiments.verdict.Criterion`.
        measure: ``(settings, seed) -> Outcome``, a module-level function; ``settings`` are those of the experiment with
            the arm's (and in a quick run ``quick``'s) on top. It must depend on nothing else.
        plot: ``(rows, path)`` draws the picture of the docs page; None for means with spread, one panel a metric.
        quick: what a quick run changes, so that all arms with one seed take less than a minute.
        quick_arms: arms of a quick run; all by default.
        version: raise it when ``measure`` changes its meaning, so that rows of before are refused.
        deterministic: the numbers do not depend on the seed; a criterion is then judged on one.
        threads: torch threads of each measurement, part of what makes it repeatable.

    Raises:
        ValueError: arms, metrics or criteria with equal names; criteria about arms that are not there; no arms or
            seeds; settings that JSON cannot hold.
    """

    slug: str
    claim: str
    settings: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    criteria: tuple[Criterion, ...]
    measure: Measure
    plot: Plot | None = None
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick_arms: tuple[str, ...] | None = None
    version: int = 1
    deterministic: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds or not self.metrics:
            raise ValueError(f"experiment {self.slug} needs at least one arm, one seed and one metric")
        for what, names in (
            ("arms", [arm.name for arm in self.arms]),
            ("metrics", [metric.name for metric in self.metrics]),
            ("criteria", [criterion.name for criterion in self.criteria]),
            ("seeds", list(self.seeds)),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} of experiment {self.slug} are not all different: {names}")
        for name in (*(name for c in self.criteria for name in c.arms), *(self.quick_arms or ())):
            self.arm(name)
        for arm in self.arms:
            self.fingerprint(arm)

    def arm(self, name: str) -> Arm:
        """The arm called ``name``.

        Raises:
            ValueError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ValueError(f"experiment {self.slug} has no arm {name!r}; its arms are {[arm.name for arm in self.arms]}")

    def settings_of(self, arm: Arm, quick: bool = False) -> dict[str, Any]:
        """What ``measure`` gets for ``arm``."""
        return {**self.settings, **arm.settings, **(self.quick if quick else {})}

    def fingerprint(self, arm: Arm) -> str:
        """Twelve hexadecimal digits that change with anything that defines the rows of ``arm``."""
        what = {"slug": self.slug, "version": self.version, "settings": self.settings_of(arm)}
        try:
            text = json.dumps(what, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings of arm {arm.name!r} of {self.slug} must be JSON values: {error}") from error
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def check_outcome(self, arm: Arm, seed: int, outcome: Outcome) -> None:
        """Refuse a measurement whose metrics are not those declared, or not finite.

        Raises:
            ValueError: naming arm, seed and metric.
        """
        needed = {metric.name for metric in self.metrics if not metric.optional}
        declared, got = {metric.name for metric in self.metrics}, set(outcome.metrics)
        if not needed <= got <= declared:
            raise ValueError(
                f"arm {arm.name!r}, seed {seed} of {self.slug} must return the metrics {sorted(declared)},"
                f" missing {sorted(needed - got)}, unknown {sorted(got - declared)}"
            )
        for name, value in outcome.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} of arm {arm.name!r}, seed {seed} of {self.slug} is {value}")


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean, sample standard deviation (0 for one seed) and number of seeds: arm -> metric -> those three."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [row for row in rows if row.arm == arm]
        summary[arm] = {name: _spread([row.metrics[name] for row in mine]) for name in mine[0].metrics}
    return summary


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return {"mean": mean, "std": math.sqrt(variance), "seeds": len(values)}
