"""``moesaic inspect``: see inside a model's MoE layers on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.common import apply_threads_and_seed, emit, stderr_console, stdout_console


def inspect(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint: ours or a transformers MoE.")],
    text: Annotated[Path | None, typer.Option(help="Text to read; the bundled Shakespeare sample by default.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report to this .html file, and its plots as PNG beside it.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of the text to read.")] = 8192,
    length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    threads: Annotated[int | None, typer.Option(help="Threads for torch.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Sizes, load, dead and overloaded experts, entropy, co-activation, and a text coloured by expert."""
    from moesaic.analysis.report import Subject, build_sections, write_report
    from moesaic.analysis.statistics import routing_statistics
    from moesaic.analysis.text import read_batches

    apply_threads_and_seed(threads)
    for name, value in (("--tokens", tokens), ("--length", length)):
        if value < 2:
            raise ValueError(f"{name} must be at least 2, got {value}")
    if html is not None and (html.suffix.lower() != ".html" or not html.parent.is_dir()):
        raise ValueError(f"--html must be a .html file in a folder that exists, got {html}")
    from moesaic.models.loading import load, model_folder

    loaded = load(model)
    reading = read_batches(model_folder(model), loaded, text, tokens, length)
    with stderr_console().status("reading the text"):
        statistics = routing_statistics(loaded, reading.batches)
    subject = Subject(loaded, model.name, statistics, reading.decode(statistics.token_ids_T), reading.source)
    sections = build_sections(subject)
    note = f"{statistics.tokens:,} tokens of {reading.source}"
    written = write_report(html, model.name, note, sections) if html is not None else []
    result: dict[str, Any] = {section.slug: section.data for section in sections}
    result["files"] = [str(path) for path in written]
    emit(result, json_output)
    if not json_output:
        _show(result, statistics, written)


def _show(result: dict[str, Any], statistics: Any, written: list[Path]) -> None:
    from rich.table import Table

    sizes = result["sizes"]
    console = stdout_console()
    console.print(
        f"{sizes['parameters']:,} parameters, {sizes['active']:,} active per token, {len(sizes['layers'])} MoE layers;"
        f" {sizes['tokens']:,} tokens of {sizes['text']}",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "experts", "per token", "entropy", "largest share", "dead", "overloaded"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in statistics.layers:
        entropy = layer.mean_entropy()
        table.add_row(
            layer.name,
            str(layer.num_experts),
            f"{layer.active_per_token():.2f}",
            "-" if entropy is None else f"{entropy:.2f}",
            f"{float(layer.share_E().max()):.1%}",
            str(len(layer.dead())),
            str(len(layer.overloaded())),
        )
    console.print(table)
    covered = sum(layer.num_experts for layer in statistics.layers)
    console.print(f"covered {len(statistics.layers)} layers, {covered} experts")
    if written:
        console.print(f"report: {written[0]} and {len(written) - 1} PNG files beside it", markup=False, soft_wrap=True)
    else:
        console.print("write the page with --html report.html")
