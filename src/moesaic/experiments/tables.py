"""Tables of results as Markdown, and the blocks of docs pages that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.experiments.base import Metric, Summary, summarise, summarise_each
from moesaic.experiments.schedule import clock
from moesaic.experiments.store import row_of
from moesaic.formats.atomic import atomic_file

_BLOCK = re.compile(r"(<!-- results:(?P<slug>[\w.-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def results_markdown(document: Mapping[str, Any]) -> str:
    """Table of means with spread, verdict and provenance of a results document, all computed from its rows.

    Args:
        document: what :func:`moesaic.experiments.store.read_results` returns.
    """
    metrics = [Metric(**entry) for entry in document["metrics"]]
    rows = [row_of(stored) for stored in document["rows"]]
    datasets = document.get("datasets", [])
    parts = [means_table(metrics, summarise(rows, datasets))]
    if datasets:
        parts += ["", datasets_table(metrics[0], summarise_each(rows))]
    parts += ["", verdict_table(document["verdict"]), "", provenance(document)]
    return "\n".join(parts) + "\n"


def means_table(metrics: Sequence[Metric], summary: Summary) -> str:
    """Arms by metrics: ``mean ± sample standard deviation``."""
    arrows = {"lower": " ↓", "higher": " ↑", "": ""}
    lines = [
        "| arm | seeds | " + " | ".join(metric.label + arrows[metric.better] for metric in metrics) + " |",
        "|---|---|" + "---|" * len(metrics),
    ]
    for arm, entry in summary.items():
        cells = [_cell(entry.get(metric.name), metric.digits) for metric in metrics]
        lines.append(f"| {arm} | {entry[metrics[0].name]['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def datasets_table(metric: Metric, each: Mapping[str, Summary]) -> str:
    """Arms by data sets for one metric, the experiment's first."""
    arms = dict.fromkeys(arm for summary in each.values() for arm in summary)
    lines = [f"| {metric.label} | " + " | ".join(each) + " |", "|---|" + "---|" * len(each)]
    for arm in arms:
        cells = [_cell(summary.get(arm, {}).get(metric.name), metric.digits) for summary in each.values()]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_table(verdict: Sequence[Mapping[str, Any]]) -> str:
    """One line a criterion: statement, threshold, value with standard error, answer."""
    lines = ["| criterion | asked | value | answer |", "|---|---|---|---|"]
    for entry in verdict:
        asked, value = _asked_and_found(entry)
        lines.append(f"| {entry['statement']} | {asked} | {value} | **{entry['status']}**{_reason(entry)} |")
    return "\n".join(lines)


def plain_means(metrics: Sequence[Metric], summary: Summary) -> str:
    """The same for a terminal: short headings, explained below, and lines that are not folded."""
    arms = [[arm, *(_cell(entry.get(m.name), m.digits) for m in metrics)] for arm, entry in summary.items()]
    legend = [f"  {m.name}: {m.label}" + (f", {m.better} is better" if m.better else "") for m in metrics]
    return "\n".join([*_aligned([["arm", *(m.name for m in metrics)], *arms]), "", *legend, ""])


def plain_verdict(verdict: Sequence[Mapping[str, Any]]) -> str:
    """One line a criterion for a terminal, the answer first."""
    lines = [[entry["status"], *_asked_and_found(entry), entry["statement"] + _reason(entry)] for entry in verdict]
    return "\n".join(_aligned([["answer", "asked", "value", "criterion"], *lines]))


def size_and_seeds(document: Mapping[str, Any]) -> list[str]:
    """What was measured: the size with its settings, the seeds, the spread, the time; a sentence each."""
    settings = [
        f"{len(value)} {name}" if isinstance(value, (list, tuple)) else f"{name} {value}"
        for name, value in document["settings"].items()
        if value is not None
    ]
    seeds = sorted({row["seed"] for row in document["rows"]})
    axis = document.get("datasets", [])
    return [
        f"Size: {document.get('size', 'the default')} ({', '.join(settings)}).",
        *([f"Data sets: {', '.join(axis)}; the first table holds averages over them."] if axis else []),
        f"Seeds: {', '.join(map(str, seeds)) or 'none yet'}.",
        f"Time: {clock(document['seconds'])} of measurement, {document['threads']} thread(s) each.",
    ]


def provenance(document: Mapping[str, Any]) -> str:
    """Size, seeds and time; command, commit, versions and CPU; what the spread is."""
    versions = document["versions"] or {}
    return (
        " ".join(size_and_seeds(document)) + "\n\n"
        f"Measured by `{document['command']}` at commit {(document['commit'] or 'unknown')[:12]},"
        f" torch {versions.get('torch')}, {document['cpu']} ({' '.join(document['cpu_flags'] or [])})."
        " Arms: mean ± standard deviation over seeds; criteria: value ± standard error."
    )


def fill_blocks(page: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """``page`` with what stands between ``<!-- results:SLUG -->`` and ``<!-- end of results -->`` made anew.

    Args:
        page: Markdown.
        documents: slug -> results document.

    Raises:
        ValueError: no block, or a block of a system without results.
    """
    if _BLOCK.search(page) is None:
        raise ValueError("the page has no block '<!-- results:SLUG -->' ... '<!-- end of results -->'")

    def fill(match: re.Match[str]) -> str:
        slug = match["slug"]
        if slug not in documents:
            raise ValueError(f"the page wants results of {slug!r}; there are results of {sorted(documents)}")
        return f"{match[1]}\n{results_markdown(documents[slug])}\n{match[3]}"

    return _BLOCK.sub(fill, page)


def slugs_of(page: str) -> list[str]:
    """Names of the results whose blocks are in ``page``."""
    return [match["slug"] for match in _BLOCK.finditer(page)]


def fill_page(path: Path, documents: Mapping[str, Mapping[str, Any]]) -> bool:
    """Fill the blocks of a page on disk; whether it changed."""
    before = path.read_text(encoding="utf-8")
    after = fill_blocks(before, documents)
    if after != before:
        with atomic_file(path) as file:
            file.write(after.encode())
    return after != before


def _cell(entry: Mapping[str, float] | None, digits: int) -> str:
    if entry is None:
        return "–"
    spread = f" ± {entry['std']:.{digits}f}" if entry["seeds"] > 1 else ""
    return f"{entry['mean']:.{digits}f}{spread}"


def _reason(entry: Mapping[str, Any]) -> str:
    return f" ({entry['reason']})" if entry.get("reason") else ""


def _asked_and_found(entry: Mapping[str, Any]) -> tuple[str, str]:
    value = "–" if entry["value"] is None else f"{entry['value']:.4g}"
    if entry["standard_error"] is not None:
        value += f" ± {entry['standard_error']:.2g}"
    return f"{entry['comparison']} {entry['threshold']:g}", value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
