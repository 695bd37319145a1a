"""``moesaic reproduce``: run a paper's experiment and judge its claim."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import FAILED, emit, stderr_console


def reproduce(
    slug: Annotated[str | None, typer.Argument(help="A system of `moesaic methods` that is ready.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The missing rows of all systems instead, cheapest first.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="2h, 1h30m, 45m: start no measurement that would not end in time.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; the experiment's own by default.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Run only this seed; may be given several times.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Run only this arm; may be given several times.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Run only this data set; may be given several times.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="A named size of the experiment; its rows go to SLUG.SIZE.json.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small, at most a minute; writes and judges nothing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be measured and how long it should take.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of SLUG.json and its plots; a rerun goes on there.")] = Path(
        "results"
    ),
    jobs: Annotated[int | None, typer.Option(help="Measurements at once; one a core by default.")] = None,
) -> None:
    """Measure every arm with every seed, then table, plot and verdict. Each row is stored as it is measured."""
    from moesaic.experiments import run
    from moesaic.experiments.schedule import duration

    started = time.monotonic()
    console = stderr_console()

    def progress(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    chosen = {"--seeds": seeds, "--seed": seed, "--arm": arm, "--dataset": dataset, "--size": size}
    given = [name for name, value in chosen.items() if value not in (None, [])]
    seconds = None if budget is None else duration(budget)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if everything:
        if slug is not None or quick or given:
            extra = [*([slug] if slug else []), *(["--quick"] if quick else []), *given]
            raise ValueError(f"--all runs all that is missing: leave out {', '.join(extra)}")
        _run_all(results, jobs, seconds, dry_run, json_output, progress)
        return
    if slug is None:
        raise ValueError("name a system of `moesaic methods`, or give --all")
    experiment = run.load_experiment(slug).at(size)
    if quick:
        forbidden = [name for name in given if name != "--size"] + [
            name for name, value in {"--jobs": jobs, "--budget": budget, "--dry-run": dry_run or None}.items() if value
        ]
        if forbidden:
            raise ValueError(f"--quick runs each arm once: leave out {', '.join(forbidden)}")
        _show_quick(experiment, run.quick(experiment, progress), json_output)
        return
    which: dict[str, Any] = {"seeds": seeds, "only_seeds": seed or (), "arms": arm, "datasets": dataset}
    if dry_run:
        _show_plan(run.plan(run.wanted_jobs(experiment, results, **which), jobs), json_output)
        return
    command = ["moesaic", "reproduce", slug]
    command += [] if size is None else ["--size", size]
    command += [] if seeds is None else ["--seeds", str(seeds)]
    document = run.reproduce(
        experiment, results, **which, jobs=jobs, budget=seconds, command=shlex.join(command), progress=progress
    )
    took = time.monotonic() - started
    progress(f"wrote {results / f'{experiment.name}.json'} and its plots")
    emit({**document, "run_seconds": round(took, 1)}, json_output)
    if not json_output:
        _show(document, took)


def _run_all(
    results: Path,
    jobs: int | None,
    budget: float | None,
    dry_run: bool,
    json_output: bool,
    progress: Callable[[str], None],
) -> None:
    from moesaic.experiments import run
    from moesaic.experiments.schedule import clock

    found = run.reproduce_all(results, jobs=jobs, budget=budget, dry_run=dry_run, progress=progress)
    if dry_run:
        _show_plan(found, json_output)
        return
    emit(found, json_output)
    if not json_output:
        for system in found["systems"]:
            verdict = ", ".join(f"{count} {status}" for status, count in system["verdict"].items())
            typer.echo(f"{system['slug']}: {system['stored']} rows, {system['missing']} missing; {verdict}")
        for failure in found["failed"]:
            arm = "" if failure["arm"] is None else f", {failure['arm']}"
            typer.echo(f"failed: {failure['slug']}{arm}: {failure['error']}")
        typer.echo(f"took {clock(found['seconds'])}")
    if found["failed"]:
        raise SystemExit(FAILED)


def _show_plan(plan: Mapping[str, Any], json_output: bool) -> None:
    from moesaic.experiments.schedule import clock

    emit(plan, json_output)
    if json_output:
        return
    for job in plan["jobs"]:
        where = "" if job["dataset"] is None else f", {job['dataset']}"
        typer.echo(f"{job['seconds']:8.1f} s  {job['slug']}: {job['arm']}{where}, seed {job['seed']}")
    typer.echo(
        f"{len(plan['jobs'])} measurements, {clock(plan['seconds'])} of work; expected to take"
        f" {clock(plan['expected_seconds'])}, {plan['at_once']} at once"
    )


def _show_quick(experiment: Any, rows: list[Any], json_output: bool) -> None:
    from moesaic.experiments.base import summarise
    from moesaic.experiments.tables import plain_means

    emit(
        {
            "slug": experiment.slug,
            "quick": True,
            "verdict": None,
            "rows": [{"arm": row.arm, "seed": row.seed, "metrics": dict(row.metrics)} for row in rows],
        },
        json_output,
    )
    if not json_output:
        typer.echo(plain_means(experiment.metrics, summarise(rows)))
        typer.echo("quick run: nothing is written, nothing is judged")


def _show(document: dict[str, Any], took: float) -> None:
    from moesaic.experiments.base import Metric
    from moesaic.experiments.schedule import clock
    from moesaic.experiments.tables import plain_means, plain_verdict, size_and_seeds

    typer.echo(plain_means([Metric(**entry) for entry in document["metrics"]], document["summary"]))
    typer.echo(plain_verdict(document["verdict"]))
    typer.echo("")
    typer.echo("\n".join([*size_and_seeds(document), "Spread: ± is the standard deviation over seeds in the table,"]))
    typer.echo(f"the standard error in the verdict. This run took {clock(took)}.")
