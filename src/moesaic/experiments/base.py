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
        seconds: about how long one measurement takes, where it differs from the experiment's; see there.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Size:
    """A named version of an experiment, larger as a rule, with a results file of its own.

    Args:
        settings: laid over the settings of the experiment and of each arm.
        seeds: what a full run uses; the experiment's own by default.
        seconds: about how long one measurement takes at this size.
    """

    settings: Mapping[str, Any]
    seeds: tuple[int, ...] | None = None
    seconds: float | None = None


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
    """A stored measurement: one arm, one seed, one data set where the experiment has several."""

    arm: str
    seed: int
    fingerprint: str
    seconds: float
    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    dataset: str | None = None


def on(arm: str, dataset: str) -> str:
    """How a criterion names an arm on one data set: ``means[on("ours", "wine")]``."""
    return f"{arm} [{dataset}]"


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
        datasets: names of data sets, a third axis: each is measured on its own and kept as a row of its own.
            ``settings["dataset"]`` tells ``measure`` which. Empty: no such axis.
        sizes: further versions by name, see :class:`Size`; the experiment itself is the one that a full run of it is
            meant to be, at most 20 minutes on two cores.
        seconds: about how long one measurement takes; what a run expects where no row of the arm is stored.
        size: name of the size that this is; None for the experiment itself. Set by :meth:`at`.

    Raises:
        ValueError: arms, metrics, criteria or data sets with equal names; criteria about arms that are not there; no
            arms or seeds; settings that JSON cannot hold; a size whose name is no file name.
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
    datasets: tuple[str, ...] = ()
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    seconds: float = 60.0
    size: str | None = None

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds or not self.metrics:
            raise ValueError(f"experiment {self.slug} needs at least one arm, one seed and one metric")
        for what, names in (
            ("arms", [arm.name for arm in self.arms]),
            ("metrics", [metric.name for metric in self.metrics]),
            ("criteria", [criterion.name for criterion in self.criteria]),
            ("seeds", list(self.seeds)),
            ("datasets", list(self.datasets)),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} of experiment {self.slug} are not all different: {names}")
        single = {on(arm.name, dataset) for arm in self.arms for dataset in self.datasets}
        for name in (*(name for c in self.criteria for name in c.arms), *(self.quick_arms or ())):
            if name not in single:
                self.arm(name)
        for name in self.sizes:
            if not name.isidentifier():
                raise ValueError(f"size {name!r} of experiment {self.slug} must be a word: it names a file")
        for arm in self.arms:
            for dataset in self.axis:
                self.fingerprint(arm, dataset)

    @property
    def name(self) -> str:
        """Of its results file: the slug, with the size behind it where this is one."""
        return self.slug if self.size is None else f"{self.slug}.{self.size}"

    @property
    def axis(self) -> tuple[str | None, ...]:
        """The data sets, or the one that has no name."""
        return self.datasets or (None,)

    def at(self, size: str | None) -> Experiment:
        """This experiment at one of its sizes; itself for None.

        Raises:
            ValueError: no such size.
        """
        if size is None:
            return self
        if size not in self.sizes:
            raise ValueError(f"size must be one of {sorted(self.sizes)} for {self.slug}, got {size!r}")
        chosen = self.sizes[size]
        return dataclasses.replace(
            self,
            settings={**self.settings, **chosen.settings},
            arms=tuple(
                Arm(arm.name, {key: chosen.settings.get(key, value) for key, value in arm.settings.items()})
                for arm in self.arms
            ),
            seeds=chosen.seeds or self.seeds,
            seconds=chosen.seconds or self.seconds,
            sizes={},
            size=size,
        )

    def arm(self, name: str) -> Arm:
        """The arm called ``name``.

        Raises:
            ValueError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ValueError(f"experiment {self.slug} has no arm {name!r}; its arms are {[arm.name for arm in self.arms]}")

    def settings_of(self, arm: Arm, quick: bool = False, dataset: str | None = None) -> dict[str, Any]:
        """What ``measure`` gets for ``arm``."""
        named = {} if dataset is None else {"dataset": dataset}
        return {**self.settings, **arm.settings, **(self.quick if quick else {}), **named}

    def fingerprint(self, arm: Arm, dataset: str | None = None) -> str:
        """Twelve hexadecimal digits that change with anything that defines the rows of ``arm`` on ``dataset``."""
        what = {"slug": self.slug, "version": self.version, "settings": self.settings_of(arm, dataset=dataset)}
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


Summary = dict[str, dict[str, dict[str, float]]]


def averages(rows: Sequence[Row], datasets: Sequence[str] = ()) -> dict[int, dict[str, Mapping[str, float]]]:
    """Metrics by seed and arm, averaged over the data sets where there are several.

    Args:
        rows: stored measurements.
        datasets: those of the experiment; an (arm, seed) that lacks one of them has no average.

    Returns:
        seed -> arm -> metric -> number, and seed -> ``on(arm, dataset)`` -> metric -> number beside it.
    """
    found: dict[int, dict[str, Mapping[str, float]]] = {}
    for row in rows:
        name = row.arm if row.dataset is None else on(row.arm, row.dataset)
        found.setdefault(row.seed, {})[name] = row.metrics
    if datasets:
        for entries in found.values():
            for arm in dict.fromkeys(row.arm for row in rows):
                parts = [entries.get(on(arm, dataset)) for dataset in datasets]
                whole = [part for part in parts if part is not None]
                if len(whole) == len(parts):
                    shared = [name for name in whole[0] if all(name in part for part in whole)]
                    entries[arm] = {name: math.fsum(part[name] for part in whole) / len(whole) for name in shared}
    return found


def summarise(rows: Sequence[Row], datasets: Sequence[str] = ()) -> Summary:
    """Mean, sample standard deviation (0 for one seed) and number of seeds: arm -> metric -> those three.

    With ``datasets`` the numbers are averages over them, of those seeds that have them all.
    """
    per_seed = averages(rows, datasets)
    summary: Summary = {}
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [per_seed[seed][arm] for seed in sorted(per_seed) if arm in per_seed[seed]]
        names = dict.fromkeys(name for entry in mine for name in entry)
        if mine:
            summary[arm] = {name: _spread([entry[name] for entry in mine if name in entry]) for name in names}
    return summary


def summarise_each(rows: Sequence[Row]) -> dict[str, Summary]:
    """The summary of each data set by itself."""
    named = dict.fromkeys(row.dataset for row in rows if row.dataset is not None)
    parts = {name: [dataclasses.replace(row, dataset=None) for row in rows if row.dataset == name] for name in named}
    return {name: summarise(part) for name, part in parts.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return {"mean": mean, "std": math.sqrt(variance), "seeds": len(values)}
