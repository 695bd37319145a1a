"""``moesaic reproduce``: run a paper's experiment and judge its claim."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import emit, stderr_console


def reproduce(
    slug: Annotated[str, typer.Argument(help="A system of `moesaic methods` that is ready.")],
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; the experiment's own by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small, at most a minute; writes and judges nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of SLUG.json and SLUG.png; a rerun goes on there.")] = Path(
        "results"
    ),
    arm: Annotated[list[str] | None, typer.Option(help="Run only this arm; may be given several times.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Measurements at once; one a core by default.")] = None,
) -> None:
    """Measure every arm with every seed, then table, plot and verdict."""
    from moesaic.experiments import run

    console = stderr_console()

    def progress(line: str) -> None:
        console.print(line, markup=False)

    experiment = run.load_experiment(slug)
    if quick:
        if seeds is not None or arm or jobs is not None:
            raise ValueError("--quick runs each arm once: leave out --seeds, --arm and --jobs")
        _show_quick(experiment, run.quick(experiment, progress), json_output)
        return
    command = shlex.join(["moesaic", "reproduce", slug, *(() if seeds is None else ("--seeds", str(seeds)))])
    document = run.reproduce(experiment, results, seeds=seeds, arms=arm, jobs=jobs, command=command, progress=progress)
    progress(f"wrote {results / f'{slug}.json'} and {results / f'{slug}.png'}")
    emit(document, json_output)
    if not json_output:
        _show(document)


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


def _show(document: dict[str, Any]) -> None:
    from moesaic.experiments.base import Metric
    from moesaic.experiments.tables import plain_means, plain_verdict

    typer.echo(plain_means([Metric(**entry) for entry in document["metrics"]], document["summary"]))
    typer.echo(plain_verdict(document["verdict"]))
