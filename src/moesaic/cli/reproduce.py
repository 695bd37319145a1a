"""``moesaic reproduce``: run a paper's experiment and judge its claim."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import emit, stderr_console, stdout_console


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

    summary = summarise(rows)
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
        _print_means(experiment.metrics, summary)
        stdout_console().print("quick run: nothing is written, nothing is judged", markup=False)


def _show(document: dict[str, Any]) -> None:
    from rich.table import Table

    from moesaic.experiments.base import Metric

    console = stdout_console()
    _print_means([Metric(**entry) for entry in document["metrics"]], document["summary"])
    table = Table(box=None, pad_edge=False, title="verdict", title_justify="left")
    for heading in ("criterion", "asked", "value", "answer"):
        table.add_column(heading, overflow="fold")
    for entry in document["verdict"]:
        value = "-" if entry["value"] is None else f"{entry['value']:.4g}"
        if entry["standard_error"] is not None:
            value += f" ± {entry['standard_error']:.2g}"
        table.add_row(entry["statement"], f"{entry['comparison']} {entry['threshold']:g}", value, entry["status"])
    console.print(table)


def _print_means(metrics: Any, summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for metric in metrics:
        table.add_column(metric.label, overflow="fold")
    for arm, entry in summary.items():
        cells = []
        for metric in metrics:
            value = entry.get(metric.name)
            if value is None:
                cells.append("-")
                continue
            spread = f" ± {value['std']:.{metric.digits}f}" if value["seeds"] > 1 else ""
            cells.append(f"{value['mean']:.{metric.digits}f}{spread}")
        table.add_row(arm, *cells)
    stdout_console().print(table)
