"""Run experiments: every measurement that is not stored yet, one process a core, each row written at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moesaic import catalog
from moesaic.experiments import pool
from moesaic.experiments.base import Arm, Experiment, Outcome, Row
from moesaic.experiments.plots import draw
from moesaic.experiments.schedule import Job, Queue, clock, missing_jobs, wall_seconds
from moesaic.experiments.store import ResultsFile

Progress = Callable[[str], None]


def load_experiment(slug: str) -> Experiment:
    """The experiment of a system of the catalogue.

    Raises:
        ValueError: no such system, or one without an experiment yet.
    """
    method = catalog.find(slug)
    if method.experiment is None:
        raise ValueError(
            f"{slug} has no experiment yet (status {method.status}); `moesaic methods` lists those that have"
        )
    experiment: Experiment = importlib.import_module(method.experiment).EXPERIMENT
    return experiment


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    seeds: int | None = None,
    only_seeds: Sequence[int] = (),
    arms: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    jobs: int | None = None,
    budget: float | None = None,
    command: str = "",
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Measure what is not stored yet, then compute table, plots and verdict.

    It can be stopped at any time: each row is written as it is measured, and the same call goes on from there.

    Args:
        experiment: what to run.
        folder: where ``SLUG.json``, ``SLUG.png`` and ``SLUG.narrow.png`` go.
        seeds: how many of the experiment's seeds, or more (counted on from its last); all of its own by default.
        only_seeds: these seeds instead.
        arms: names of the arms to run; all by default.
        datasets: names of the data sets to run; all by default.
        jobs: processes at once; one a core by default.
        budget: seconds; no measurement starts that is not expected to end in time.
        command: what is stored as the way to repeat this.
        progress: called with a line of text after each measurement.

    Returns:
        The document of the results file.

    Raises:
        ValueError: unknown arms or data sets, seeds or jobs below 1, rows of another configuration, a result that is
            not finite. An error of a measurement, once those that ran beside it are stored.
    """
    results = ResultsFile(experiment, folder)
    queue = Queue(
        missing_jobs(results, _seeds(experiment, seeds, only_seeds), arms=arms or (), datasets=datasets or ()), budget
    )
    progress(
        f"{experiment.name}: {len(queue.left)} measurements to make, {len(results.rows)} stored{_expected(queue, jobs)}"
    )
    failed = _work(queue, {experiment.slug: results}, {experiment.slug: command}, jobs, progress, keep_going=False)
    if failed:
        raise failed[0][1]
    if queue.left:
        progress(f"{len(queue.left)} measurements do not fit into the budget; the same command goes on with them")
    results.write()
    draw(experiment, results.rows, folder)
    return results.document()


def reproduce_all(
    folder: Path,
    *,
    jobs: int | None = None,
    budget: float | None = None,
    dry_run: bool = False,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """The missing rows of every system of the catalogue that has an experiment, cheapest first.

    A measurement that fails takes the rest of its arm out and nothing else.

    Args:
        folder: where the results files are.
        jobs: processes at once; one a core by default.
        budget: seconds; no measurement starts that is not expected to end in time.
        dry_run: only say what would be run.
        progress: called with a line of text after each measurement.

    Returns:
        ``systems`` (slug, stored, missing, counts of the verdict), ``failed``, ``not_started``, ``seconds``; in a dry
        run ``jobs`` in the order of the run and ``expected_seconds``.
    """
    files: dict[str, ResultsFile] = {}
    found: list[Job] = []
    failed: list[dict[str, Any]] = []
    for method in catalog.METHODS:
        if method.experiment is None:
            continue
        try:
            results = ResultsFile(load_experiment(method.slug), folder)
            found += missing_jobs(results, results.experiment.seeds)
        except (ValueError, ImportError) as error:
            failed.append({"slug": method.slug, "arm": None, "error": str(error)})
            progress(f"{method.slug}: {error}")
        else:
            files[method.slug] = results
    queue = Queue(sorted(found, key=lambda job: job.seconds), budget)
    progress(f"{len(found)} measurements missing in {len(files)} systems{_expected(queue, jobs)}")
    if dry_run:
        return plan(queue.left, jobs)
    commands = {slug: f"moesaic reproduce {slug}" for slug in files}
    for job, why in _work(queue, files, commands, jobs, progress, keep_going=True):
        failed.append({"slug": job.experiment.slug, "arm": job.arm.name, "error": f"{type(why).__name__}: {why}"})
    for slug in dict.fromkeys(job.experiment.slug for job in found):
        files[slug].write()
        draw(files[slug].experiment, files[slug].rows, folder)
    if queue.left:
        progress(f"{len(queue.left)} measurements do not fit into the budget; the same command goes on with them")
    return {
        "systems": [_state(results) for results in files.values()],
        "failed": failed,
        "not_started": len(queue.left),
        "seconds": round(queue.elapsed, 1),
    }


def plan(todo: Sequence[Job], jobs: int | None = None) -> dict[str, Any]:
    """What ``--dry-run`` prints: the jobs in order with their expected seconds, the sum, and the time on the clock."""
    many = pool.cores() if jobs is None else jobs
    return {
        "jobs": [job.described() for job in todo],
        "seconds": round(sum(job.seconds for job in todo), 1),
        "at_once": many,
        "expected_seconds": round(wall_seconds(todo, many), 1),
    }


def quick(experiment: Experiment, progress: Progress = lambda line: None) -> list[Row]:
    """Every arm once, small, in this process, on the first data set; nothing is written and nothing is judged."""
    names = experiment.quick_arms or tuple(arm.name for arm in experiment.arms)
    rows = []
    for name in names:
        arm, seed = experiment.arm(name), experiment.seeds[0]
        outcome, seconds = measure(experiment, arm, seed, quick=True, dataset=experiment.axis[0])
        rows.append(Row(name, seed, "quick", seconds, outcome.metrics, outcome.curves))
        progress(f"{name}: {_brief(experiment, outcome)} ({seconds:.1f} s)")
    return rows


def measure(
    experiment: Experiment, arm: Arm, seed: int, *, quick: bool = False, dataset: str | None = None
) -> tuple[Outcome, float]:
    """One arm with one seed, with the experiment's number of threads; the outcome and the seconds it took."""
    settings = experiment.settings_of(arm, quick, dataset)
    outcome, seconds = pool.timed(experiment.measure, settings, seed, experiment.threads)
    experiment.check_outcome(arm, seed, outcome)
    return outcome, seconds


def wanted_jobs(
    experiment: Experiment,
    folder: Path,
    *,
    seeds: int | None = None,
    only_seeds: Sequence[int] = (),
    arms: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
) -> list[Job]:
    """What :func:`reproduce` with these arguments would run."""
    results = ResultsFile(experiment, folder)
    return missing_jobs(results, _seeds(experiment, seeds, only_seeds), arms=arms or (), datasets=datasets or ())


def _work(
    queue: Queue,
    files: dict[str, ResultsFile],
    commands: dict[str, str],
    jobs: int | None,
    progress: Progress,
    *,
    keep_going: bool,
) -> list[tuple[Job, Exception]]:
    """Run the queue and store each row; what failed. Without ``keep_going`` nothing starts after a failure."""
    total, count, kept = len(queue.left), 0, 0
    failed: list[tuple[Job, Exception]] = []
    many = len({job.experiment.slug for job in queue.left}) > 1
    try:
        for job, outcome, seconds in pool.run_jobs(queue, jobs):
            count += 1
            where = f"[{count}/{total}] " + (f"{job.experiment.slug}: " if many else "")
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                files[job.experiment.slug].add(
                    job.arm, job.seed, outcome, seconds, commands[job.experiment.slug], job.dataset
                )
            except Exception as error:  # noqa: BLE001 - whatever a measurement raises is reported with its name
                failed.append((job, error))
                dropped = queue.drop(job) if keep_going else 0
                count += dropped
                if not keep_going:
                    queue.left.clear()
                others = f"; {dropped} more of this arm left out" if dropped else ""
                progress(f"{where}{job} failed: {type(error).__name__}: {error}{others}")
            else:
                kept += 1
                queue.done(job, seconds)
                progress(f"{where}{job}: {_brief(job.experiment, outcome)} ({seconds:.0f} s)")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{kept} new rows are stored; the same command goes on from there") from None
    return failed


def _expected(queue: Queue, jobs: int | None) -> str:
    if not queue.left:
        return ""
    many = pool.cores() if jobs is None else max(jobs, 1)
    return f"; expected to take {clock(wall_seconds(queue.left, many))}, {many} at once"


def _state(results: ResultsFile) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for entry in results.document()["verdict"]:
        counts[entry["status"]] = counts.get(entry["status"], 0) + 1
    missing = missing_jobs(results, results.experiment.seeds)
    return {
        "slug": results.experiment.slug,
        "stored": len(results.rows),
        "missing": len(missing),
        "seconds": round(sum(row.seconds for row in results.rows), 1),
        "verdict": counts,
    }


def _seeds(experiment: Experiment, count: int | None, only: Sequence[int]) -> list[int]:
    own = list(experiment.seeds)
    if only:
        if count is not None:
            raise ValueError("give a number of seeds or the seeds themselves, not both")
        for seed in only:
            if seed < 0:
                raise ValueError(f"seed must be at least 0, got {seed}")
        return list(dict.fromkeys(only))
    if count is None:
        return own
    if count < 1:
        raise ValueError(f"seeds must be at least 1, got {count}")
    return (own + list(range(max(own) + 1, max(own) + 1 + count)))[:count]


def _brief(experiment: Experiment, outcome: Outcome) -> str:
    shown = [metric for metric in experiment.metrics if metric.name in outcome.metrics][:3]
    return ", ".join(f"{metric.name} {outcome.metrics[metric.name]:.{metric.digits}f}" for metric in shown)
