"""Which measurements are missing, what each is expected to take, and which may still start within a budget."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moesaic.experiments.base import Arm, Experiment, Row
from moesaic.experiments.store import ResultsFile

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement to make: an arm with a seed, on a data set where the experiment has several.

    Args:
        experiment: whose.
        arm: which line of the table.
        seed: which repetition.
        dataset: which data set; None without such an axis.
        seconds: how long it is expected to take.
    """

    experiment: Experiment
    arm: Arm
    seed: int
    dataset: str | None
    seconds: float

    def __str__(self) -> str:
        where = "" if self.dataset is None else f", {self.dataset}"
        return f"{self.arm.name}{where}, seed {self.seed}"

    def described(self) -> dict[str, Any]:
        """For ``--json`` and ``--dry-run``."""
        return {
            "slug": self.experiment.slug,
            "arm": self.arm.name,
            "seed": self.seed,
            "dataset": self.dataset,
            "seconds": round(self.seconds, 1),
        }


def missing_jobs(
    results: ResultsFile,
    seeds: Sequence[int],
    *,
    arms: Sequence[str] = (),
    datasets: Sequence[str] = (),
) -> list[Job]:
    """What is not stored yet, seed by seed, so that an interrupted run has whole seeds.

    Args:
        results: the stored rows.
        seeds: to run.
        arms: names of those to run; all by default.
        datasets: names of those to run; all by default.

    Raises:
        ValueError: an arm or a data set that the experiment does not have.
    """
    experiment = results.experiment
    wanted = [experiment.arm(name) for name in dict.fromkeys(arms)] if arms else list(experiment.arms)
    for name in datasets:
        if name not in experiment.datasets:
            has = f"its data sets are {list(experiment.datasets)}" if experiment.datasets else "it has no such axis"
            raise ValueError(f"experiment {experiment.slug} has no data set {name!r}; {has}")
    places = [name for name in experiment.axis if not datasets or name in datasets]
    rows = results.rows
    return [
        Job(experiment, arm, seed, dataset, expected_seconds(experiment, arm, dataset, rows))
        for seed in seeds
        for arm in wanted
        for dataset in places
        if not results.has(arm, seed, dataset)
    ]


def expected_seconds(experiment: Experiment, arm: Arm, dataset: str | None, rows: Iterable[Row]) -> float:
    """What a measurement will take: the median of the nearest stored rows, else what the experiment declares.

    Nearest are rows of the same arm on the same data set, then of the same arm. The median, because a machine that was
    busy for one of them says nothing about the next.
    """
    mine = [row for row in rows if row.arm == arm.name]
    near = [row.seconds for row in mine if row.dataset == dataset] or [row.seconds for row in mine]
    if near:
        return statistics.median(near)
    if arm.seconds is not None:
        return arm.seconds
    return experiment.seconds


def duration(text: str) -> float:
    """Seconds of ``2h``, ``1h30m``, ``45m``, ``90s`` or ``90``.

    Raises:
        ValueError: not of that form, or zero.
    """
    found = re.fullmatch(r"\s*((?:\d+(?:\.\d+)?[hms]\s*)+|\d+(?:\.\d+)?)\s*", text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms]?)", text) if found else []
    seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"budget must be a time such as 2h, 1h30m, 45m or 90s, got {text!r}")
    return seconds


def clock(seconds: float) -> str:
    """``12 s``, ``4 min 10 s``, ``2 h 5 min``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Queue:
    """Jobs in order, of which none starts that is not expected to end within the budget.

    Expectations come from other days and machines. Where the jobs that are done took longer than expected, the others
    are expected to, too; where they took less, nothing is concluded: it may have been their kind.

    Args:
        jobs: first come, first served.
        budget: seconds from now, or None.
        now: the clock, for tests.
    """

    def __init__(self, jobs: Iterable[Job], budget: float | None = None, now: Callable[[], float] = time.monotonic):
        self.left = list(jobs)
        self._now, self._budget, self._start = now, budget, now()
        self._measured = self._expected = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def take(self, most_threads: int | None = None) -> Job | None:
        """The next job that fits into the budget and into ``most_threads``; None when there is none now."""
        for index, job in enumerate(self.left):
            if most_threads is not None and job.experiment.threads > most_threads:
                continue
            if self.fits(job):
                return self.left.pop(index)
        return None

    def fits(self, job: Job) -> bool:
        """Whether ``job``, started now, is expected to end within the budget."""
        scale = max(1.0, self._measured / self._expected) if self._expected else 1.0
        return self._budget is None or self.elapsed + scale * job.seconds <= self._budget

    def done(self, job: Job, seconds: float) -> None:
        """Learn from a finished job."""
        self._measured += seconds
        self._expected += job.seconds

    def drop(self, like: Job) -> int:
        """Take out the other jobs of an arm that failed; how many there were."""
        before = len(self.left)
        self.left = [job for job in self.left if (job.experiment.slug, job.arm) != (like.experiment.slug, like.arm)]
        return before - len(self.left)


def wall_seconds(jobs: Sequence[Job], cores: int) -> float:
    """About how long ``jobs`` take on ``cores``: never less than the longest of them."""
    work = sum(job.seconds * min(job.experiment.threads, cores) for job in jobs)
    return max([work / cores, *(job.seconds for job in jobs)])
