"""``moesaic doctor``: what this machine has, and what will be slow on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moesaic.cli.common import apply_threads_and_seed, emit, stdout_console


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads for the bandwidth probe.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the bandwidth probe (1 GiB of memory).")] = False,
) -> None:
    """Versions, CPU flags, compiler, memory bandwidth, extras, and what will be slow here."""
    from moesaic.analysis import machine

    apply_threads_and_seed(threads)
    facts: dict[str, Any] = machine.machine_facts()
    facts["compiler"] = machine.compiler()
    facts["read_gb_per_s"] = None if quick else round(machine.read_bandwidth(), 1)
    facts["extras"] = machine.extras()
    facts["slow"] = slow_parts(facts)
    emit(facts, json_output)
    if not json_output:
        _show(facts)


def slow_parts(facts: dict[str, Any]) -> list[str]:
    """Sentences on what will be slow or missing, each with what to do."""
    found = []
    flags = set(facts["cpu_flags"])
    if facts["cuda"] is None and not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        found.append("bf16 is emulated on this CPU: train and run in float32")
    if facts["cuda"] is None and not flags & {"avx512f", "asimd"}:
        found.append("no AVX-512: matrix products run at about half the rate of the tables measured with it")
    if facts["compiler"] is None:
        found.append("no C++ compiler: torch.compile falls back to eager; install g++")
    if facts["cores"] and facts["threads"] < facts["cores"]:
        found.append(f"torch uses {facts['threads']} of {facts['cores']} cores: raise --threads or OMP_NUM_THREADS")
    missing = [extra for extra, there in facts["extras"].items() if not there]
    if missing:
        found.append(f"extras not installed: {', '.join(missing)} (pip install 'moesaic[NAME]')")
    return found


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    bandwidth = facts["read_gb_per_s"]
    table.add_row("cpu", f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads")
    table.add_row("flags", " ".join(facts["cpu_flags"]) or "unknown")
    table.add_row("memory", f"{facts['memory_gib']} GiB")
    table.add_row("read bandwidth", "not measured" if bandwidth is None else f"{bandwidth} GB/s")
    table.add_row("compiler", facts["compiler"] or "none")
    table.add_row("cuda", facts["cuda"] or "none")
    table.add_row("extras", ", ".join(name for name, there in facts["extras"].items() if there) or "none")
    console = stdout_console()
    console.print(table)
    for sentence in facts["slow"]:
        console.print(f"- {sentence}", markup=False, soft_wrap=True)
