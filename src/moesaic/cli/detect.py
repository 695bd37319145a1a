"""``moesaic detect``: which rows of a table are unlike its normal rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.common import apply_threads_and_seed, emit, stderr_console, stdout_console

if TYPE_CHECKING:
    from moesaic.tabular import Explanation


def detect(
    table: Annotated[
        Path,
        typer.Argument(help="Table to judge: .csv (commas or semicolons) or .tsv, also .gz; line 1 names columns."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Scores go to this .csv file.")],
    context: Annotated[
        Path | None,
        typer.Option(help="Table of normal rows; without it the rows of TABLE are judged against each other."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Report page; by default OUTPUT with the suffix .html.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Leave this column out; may be given several times.")] = None,
    contamination: Annotated[
        float | None,
        typer.Option(help="Share of the normal rows above the threshold; 0.05 and scores above 0.5 by default."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the highest rows to explain.")] = 20,
    model: Annotated[Path | None, typer.Option(help="Network to use instead of the shipped one.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for torch.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Score the rows of a table, explain the highest, write scores and a report page. No training."""
    import numpy as np

    from moesaic.analysis.report import write_report
    from moesaic.tabular import OneForAllDetector
    from moesaic.tabular.report import anomaly_sections

    apply_threads_and_seed(threads)
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    page = output.with_suffix(".html") if html is None else html
    for name, path, suffix in (("--output", output, ".csv"), ("--html", page, ".html")):
        if path.suffix.lower() != suffix or not path.parent.is_dir():
            raise ValueError(f"{name} must be a {suffix} file in a folder that exists, got {path}")
    for source in (table, context):
        if source is not None and output.exists() and source.exists() and output.samefile(source):
            raise ValueError(f"--output is {output}, which is read as well and would be overwritten: name another file")
    frame = _read(table, drop or [])
    normal = frame if context is None else _read(context, drop or [])
    if context is not None:
        frame = _same_columns(frame, normal, table, context)
    detector = OneForAllDetector(
        "pretrained" if model is None else model, contamination="auto" if contamination is None else contamination
    )
    with stderr_console().status(f"comparing {len(frame):,} rows with {len(normal):,}"):
        with _naming(context or table):
            detector.fit(normal)
        with _naming(table):
            scores = detector.decision_scores_ if context is None else -detector.score_samples(frame)
    highest = np.argsort(-scores, kind="stable")[:top]
    with stderr_console().status(f"explaining {len(highest)} rows"):
        why = detector.explain(frame.iloc[highest])
        sections = anomaly_sections(detector, frame, scores, highest.tolist(), why)
    flagged = scores > detector.threshold_
    _write_scores(output, scores, flagged, highest, why)
    note = f"{len(frame):,} rows of {table.name} against {len(normal):,} rows of {(context or table).name}"
    written = write_report(page, table.name, note, sections)
    result: dict[str, Any] = {section.slug: section.data for section in sections}
    result["files"] = [str(output), *(str(path) for path in written)]
    emit(result, json_output)
    if not json_output:
        _show(result, int(flagged.sum()), len(frame))


def _read(path: Path, drop: list[str]) -> Any:
    from moesaic.tabular.files import read_table

    frame = read_table(path)
    unknown = [name for name in drop if name not in frame.columns]
    if unknown:
        raise ValueError(
            f"--drop {unknown[0]!r} is no column of {path}; its columns are {', '.join(map(str, frame.columns))}"
        )
    frame = frame.drop(columns=drop)
    if not len(frame) or not len(frame.columns):
        raise ValueError(
            f"{path} has {len(frame)} rows and {len(frame.columns)} columns to compare; give at least 1 of each"
        )
    return frame


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Refusals of a table name its file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _same_columns(frame: Any, normal: Any, table: Path, context: Path) -> Any:
    """``frame`` with the columns of ``normal`` in that order."""
    missing = [name for name in normal.columns if name not in frame.columns]
    extra = [name for name in frame.columns if name not in normal.columns]
    if missing or extra:
        raise ValueError(
            f"{table} and {context} must have the same columns: the first lacks {missing}, the second {extra};"
            " --drop leaves columns out"
        )
    return frame[list(normal.columns)]


def _write_scores(output: Path, scores: Any, flagged: Any, highest: Any, why: Explanation) -> None:
    import pandas as pd

    from moesaic.formats.atomic import atomic_file

    columns = [""] * len(scores)
    for place, row in enumerate(highest):
        columns[row] = "; ".join(f"{name} {share:.2f}" for name, share in why.top_columns(place))
    values = {"row": range(1, len(scores) + 1), "score": scores, "anomaly": flagged.astype(int), "columns": columns}
    with atomic_file(output) as file:
        file.write(pd.DataFrame(values).to_csv(index=False, float_format="%.6f").encode())


def _show(result: dict[str, Any], flagged: int, rows: int) -> None:
    console = stdout_console()
    console.print(f"{flagged:,} of {rows:,} rows flagged, threshold {result['scores']['threshold']:.3f}")
    for entry in result["rows"]["rows"][:10]:
        names = ", ".join(f"{name} {share:.0%}" for name, share in entry["columns"].items())
        line = f"row {entry['row']:>6}  score {entry['score']:.3f}{' *' if entry['flagged'] else '  '}  {names}"
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"scores: {result['files'][0]}, report: {result['files'][1]}", markup=False, soft_wrap=True)
