"""Run an experiment: every arm with every seed that is not stored yet, one process a core."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from moesaic.catalog import find
from moesaic.experiments.base import Arm, Experiment, Measure, Outcome, Row
from moesaic.experiments.plots import plot_means
from moesaic.experiments.store import ResultsFile

Progress = Callable[[str], None]


def load_experiment(slug: str) -> Experiment:
    """The experiment of a system of the catalogue.

    Raises:
        ValueError: no such system, or one without an experiment yet.
    """
    method = find(slug)
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
    arms: Sequence[str] | None = None,
    jobs: int | None = None,
    command: str = "",
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """Measure what is not stored yet, then compute table, plot and verdict.

    Args:
        experiment: what to run.
        folder: where ``SLUG.json`` and ``SLUG.png`` go.
        seeds: how many of the experiment's seeds, or more (counted on from its last); all of its own by default.
        arms: names of the arms to run; all by default.
        jobs: processes at once; one a core by default.
        command: what is stored as the way to repeat this.
        progress: called with a line of text after each measurement.

    Returns:
        The document of the results file.

    Raises:
        ValueError: unknown arms, seeds or jobs below 1, rows of another configuration, a result that is not finite.
    """
    wanted = [experiment.arm(name) for name in arms] if arms else list(experiment.arms)
    results = ResultsFile(experiment, folder)
    todo = [(arm, seed) for seed in _seeds(experiment, seeds) for arm in wanted if not results.has(arm, seed)]
    progress(f"{experiment.slug}: {len(todo)} measurements to make, {len(results.rows)} stored")
    for count, (arm, seed, outcome, seconds) in enumerate(_measure_all(experiment, todo, jobs), 1):
        results.add(arm, seed, outcome, seconds, command)
        progress(f"[{count}/{len(todo)}] {arm.name}, seed {seed}: {_brief(experiment, outcome)} ({seconds:.0f} s)")
    results.write()
    draw(experiment, results.rows, folder / f"{experiment.slug}.png")
    return results.document()


def quick(experiment: Experiment, progress: Progress = lambda line: None) -> list[Row]:
    """Every arm once, small, in this process; nothing is written and nothing is judged."""
    names = experiment.quick_arms or tuple(arm.name for arm in experiment.arms)
    rows = []
    for name in names:
        arm, seed = experiment.arm(name), experiment.seeds[0]
        outcome, seconds = measure(experiment, arm, seed, quick=True)
        rows.append(Row(name, seed, "quick", seconds, outcome.metrics, outcome.curves))
        progress(f"{name}: {_brief(experiment, outcome)} ({seconds:.1f} s)")
    return rows


def measure(experiment: Experiment, arm: Arm, seed: int, *, quick: bool = False) -> tuple[Outcome, float]:
    """One arm with one seed, with the experiment's number of threads; the outcome and the seconds it took."""
    outcome, seconds = _timed(experiment.measure, experiment.settings_of(arm, quick), seed, experiment.threads)
    experiment.check_outcome(arm, seed, outcome)
    return outcome, seconds


def draw(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    """Write the experiment's picture; nothing where there are no rows."""
    if rows:
        temporary = path.with_name(f".{os.getpid()}.{path.name}")
        if experiment.plot is not None:
            experiment.plot(rows, temporary)
        else:
            plot_means(experiment.metrics, rows, temporary)
        temporary.replace(path)


def _seeds(experiment: Experiment, count: int | None) -> list[int]:
    own = list(experiment.seeds)
    if count is None:
        return own
    if count < 1:
        raise ValueError(f"seeds must be at least 1, got {count}")
    return (own + list(range(max(own) + 1, max(own) + 1 + count)))[:count]


def _measure_all(
    experiment: Experiment, todo: Sequence[tuple[Arm, int]], jobs: int | None
) -> Iterator[tuple[Arm, int, Outcome, float]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    jobs = max(1, cores // experiment.threads) if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1 or len(todo) < 2:
        for arm, seed in todo:
            yield arm, seed, *measure(experiment, arm, seed)
        return
    # spawn: a fork of a process that runs torch threads can hang.
    with ProcessPoolExecutor(min(jobs, len(todo)), multiprocessing.get_context("spawn")) as pool:
        futures = {
            pool.submit(_timed, experiment.measure, experiment.settings_of(arm), seed, experiment.threads): (arm, seed)
            for arm, seed in todo
        }
        try:
            for future in as_completed(futures):
                yield *futures[future], *future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _timed(function: Measure, settings: Mapping[str, Any], seed: int, threads: int) -> tuple[Outcome, float]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start = time.perf_counter()
        outcome = function(settings, seed)
        return outcome, time.perf_counter() - start
    finally:
        torch.set_num_threads(before)


def _brief(experiment: Experiment, outcome: Outcome) -> str:
    shown = [metric for metric in experiment.metrics if metric.name in outcome.metrics][:3]
    return ", ".join(f"{metric.name} {outcome.metrics[metric.name]:.{metric.digits}f}" for metric in shown)
