"""``moesaic methods``: the catalogue, and the tables of measured results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import emit, stderr_console, stdout_console


def methods(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    table: Annotated[str | None, typer.Option(help="Print the measured table of this system as Markdown.")] = None,
    fill: Annotated[
        list[Path] | None, typer.Option(help="Fill the result blocks of this docs page; may be given several times.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results files.")] = Path("results"),
) -> None:
    """The 38 systems: what each changes, what is there, what was measured."""
    if table is not None:
        _print_table(table, results, json_output)
    elif fill:
        _fill(fill, results, json_output)
    else:
        _list(json_output, results)


def catalogue(results: Path) -> list[dict[str, Any]]:
    """One entry a system; ``verdict`` counts its criteria by answer where results are stored."""
    from moesaic.catalog import METHODS

    entries = []
    for method in METHODS:
        entries.append(
            {
                "slug": method.slug,
                "title": method.title,
                "arxiv": method.arxiv,
                "changes": method.changes,
                "summary": method.summary,
                "names": [f"moesaic.{name.replace(':', '.')}" for name in method.names],
                "experiment": method.experiment,
                "status": method.status,
                "verdict": _counts(results / f"{method.slug}.json"),
            }
        )
    return entries


def _counts(path: Path) -> dict[str, int] | None:
    import json

    if not path.exists():
        return None
    counts: dict[str, int] = {}
    for entry in json.loads(path.read_text(encoding="utf-8")).get("verdict", []):
        counts[entry["status"]] = counts.get(entry["status"], 0) + 1
    return counts


def _list(json_output: bool, results: Path) -> None:
    entries = catalogue(results)
    emit({"methods": entries}, json_output)
    if json_output:
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("slug", "changes", "status", "verdict", "what it does"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        verdict = ", ".join(f"{count} {status}" for status, count in (entry["verdict"] or {}).items())
        table.add_row(entry["slug"], entry["changes"], entry["status"], verdict, entry["summary"])
    stdout_console().print(table)


def _print_table(slug: str, results: Path, json_output: bool) -> None:
    from moesaic.catalog import find
    from moesaic.experiments.store import read_results
    from moesaic.experiments.tables import results_markdown

    path = results / f"{find(slug).slug}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: `moesaic reproduce {slug}` measures and writes it")
    document = read_results(path)
    emit(document, json_output)
    if not json_output:
        typer.echo(results_markdown(document), nl=False)


def _fill(pages: list[Path], results: Path, json_output: bool) -> None:
    from moesaic.experiments.store import read_results
    from moesaic.experiments.tables import fill_page, slugs_of

    documents = {path.stem: read_results(path) for path in sorted(results.glob("*.json"))}
    changed = [str(page) for page in pages if fill_page(page, documents)]
    shown = sorted({slug for page in pages for slug in slugs_of(page.read_text(encoding="utf-8"))})
    plots = [str(path) for slug in shown for path in _draw(documents[slug], results)]
    emit({"pages": [str(page) for page in pages], "changed": changed, "plots": plots}, json_output)
    stderr_console().print(f"{len(pages)} page(s) read, {len(changed)} changed, {len(plots)} plots drawn", markup=False)


def _draw(document: dict[str, Any], results: Path) -> list[Path]:
    """Both pictures of a results file, from its rows."""
    from moesaic.experiments.plots import draw
    from moesaic.experiments.run import load_experiment
    from moesaic.experiments.store import row_of

    experiment = load_experiment(document["slug"]).at(document.get("size"))
    return draw(experiment, [row_of(stored) for stored in document["rows"]], results)
