"""``moesaic train``: train a language model as a config file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.common import apply_threads_and_seed, emit, stderr_console, stdout_console


def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the keys model, data, train and out.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.KEY=VALUE, such as train.steps=100; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in the folder.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; overrides the config's.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too (extra).")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    seed: Annotated[int | None, typer.Option(help="Overrides train.seed.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train, with checkpoints that survive a kill; Ctrl-C finishes the step, saves and leaves with code 130."""
    from moesaic.training.config_file import read_run_config
    from moesaic.training.observers import Observer, ProgressLine, TensorBoard
    from moesaic.training.run import train_from_config

    apply_threads_and_seed(threads)
    overrides = list(set_ or ())
    if seed is not None:
        overrides.append(f"train.seed={seed}")
    run = read_run_config(config, overrides)
    if out is not None:
        run.out = str(out)
    observers: list[Observer] = [ProgressLine(stderr_console())]
    if tensorboard and run.out is not None:
        observers.append(TensorBoard(Path(run.out) / "tensorboard"))
    report = train_from_config(run, resume=resume, device=device, observers=observers)
    emit(report.as_dict(), json_output)
    if not json_output:
        for line in report.lines():
            stdout_console().print(line, markup=False)
