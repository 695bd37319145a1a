"""Who listens to a run: metrics as JSON lines, TensorBoard, a progress line on stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Observer:
    """Base of listeners; every method does nothing by default."""

    def on_start(self, step: int, steps: int | None, seconds: float | None) -> None:
        """Training begins (or goes on) at ``step``."""

    def on_step(self, step: int, progress: float) -> None:
        """A step was taken; must be cheap."""

    def on_log(self, metrics: Mapping[str, Any]) -> None:
        """Metrics of a logged step or of an evaluation (those have the key ``eval_loss``)."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self) -> None:
        """The run is over, however it ended."""


class MetricsFile(Observer):
    """Appends one JSON object a line to a file.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_log(self, metrics: Mapping[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(metrics), allow_nan=False) + "\n")

    def offset(self) -> int:
        """Bytes written and on disk, to be kept in a checkpoint."""
        if not self.path.is_file():
            return 0
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return self.path.stat().st_size

    def truncate(self, offset: int) -> None:
        """Drop what was written after ``offset``: steps that a resumed run takes again."""
        if self.path.is_file() and self.path.stat().st_size > offset:
            os.truncate(self.path, offset)


class TensorBoard(Observer):
    """Writes every number of the metrics as a TensorBoard scalar.

    Args:
        folder: where event files go.

    Raises:
        ImportError: without the extra.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoard is not installed: pip install "moesaic[tensorboard]"') from error
        self._writer = SummaryWriter(str(folder))

    def on_log(self, metrics: Mapping[str, Any]) -> None:
        """Write scalars under their names."""
        for name, value in metrics.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, metrics["step"])

    def on_end(self) -> None:
        """Flush and close."""
        self._writer.close()


class ProgressLine(Observer):
    """One line on stderr with loss, tokens/s, load and time left; silent when stderr is no terminal.

    Args:
        console: where to draw; stderr by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = Console(stderr=True) if console is None else console
        self._progress = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
            transient=False,
            auto_refresh=False,  # a drawing thread would take a core from training
        )
        self._task = self._progress.add_task("train", total=1.0, step=0, text="")

    def on_start(self, step: int, steps: int | None, seconds: float | None) -> None:
        """Draw the empty line."""
        if not self._progress.disable:
            self._progress.start()
            self._progress.update(self._task, step=step)

    def on_log(self, metrics: Mapping[str, Any]) -> None:
        """Redraw with the latest numbers."""
        if "eval_loss" in metrics:
            if not self._progress.disable:
                self._progress.console.print(
                    f"step {metrics['step']}: held-out loss {metrics['eval_loss']:.4f}", highlight=False
                )
            return
        text = f"loss {metrics['loss']:.4f}  {_speed(metrics)}"
        if "max_over_mean" in metrics:
            text += f"  busiest expert {metrics['max_over_mean']:.1f} x mean"
        text += f"  {_clock(metrics['seconds_left'])} left"
        self._progress.update(self._task, completed=metrics["progress"], step=metrics["step"], text=text, refresh=True)

    def on_end(self) -> None:
        """Leave the line as it is."""
        if not self._progress.disable:
            self._progress.stop()


def _speed(metrics: Mapping[str, Any]) -> str:
    """Tokens, rows ... a second, by the name under which the task counts them."""
    unit = next(name.removesuffix("_per_second") for name in metrics if name.endswith("_per_second"))
    return f"{_short(metrics[f'{unit}_per_second'])} {unit}/s"


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
