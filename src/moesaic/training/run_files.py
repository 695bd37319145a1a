"""What a run writes: metrics, checkpoints, the finished model, the routing table, the report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from moesaic.formats.atomic import atomic_file, atomic_folder, remove_leftovers
from moesaic.formats.checkpoint import latest_checkpoint, list_checkpoints, save_checkpoint, unshared
from moesaic.training.averaging import WeightAverage
from moesaic.training.config import TrainConfig
from moesaic.training.observers import MetricsFile
from moesaic.training.report import TrainReport
from moesaic.training.run_state import RunState, check_same_run
from moesaic.training.statistics import LoadTable
from moesaic.training.task import Task

HookStates = Callable[[Mapping[str, Tensor]], None]


class RunFiles:
    """The folder of a run.

    ``metrics.jsonl``, ``checkpoints/step-XXXXXXXX/`` (each also a model folder), and at the end ``model/``,
    ``routing.safetensors`` and ``report.json``.

    Args:
        out: the folder.
        config: of the run.
        task: of the run.

    Attributes:
        metrics: path of the metrics file.
        last_checkpoint: newest checkpoint that is whole, or None.
    """

    def __init__(self, out: Path, config: TrainConfig, task: Task[Any]) -> None:
        self.out = out
        self.config = config
        self.task = task
        self.metrics = out / "metrics.jsonl"
        self.checkpoints = checkpoints_of(out)
        self.last_checkpoint: Path | None = None
        self._fingerprint = task.fingerprint()

    def begin(self, resume: bool, state: RunState, new_average: Callable[[], WeightAverage], hooks: HookStates) -> None:
        """Start a fresh run, or put ``state`` where the latest checkpoint was and cut the metrics back to it.

        Args:
            resume: go on from the latest checkpoint.
            state: what is put back.
            new_average: makes an average, called when the checkpoint has one.
            hooks: gets the saved state of the hooks before the weights are loaded.

        Raises:
            ValueError: the folder holds checkpoints and ``resume`` is off; see :meth:`Trainer.train`.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.out)
        if not resume:
            found = list_checkpoints(self.checkpoints)
            if found:
                raise ValueError(
                    f"out is {str(self.out)!r}, which holds a run up to {found[-1].name}:"
                    " resume it, or name another folder"
                )
            remove_leftovers(self.checkpoints)
            MetricsFile(self.metrics).truncate(0)
            return
        checkpoint = latest_checkpoint(self.checkpoints)
        hooks({name: value for name, value in checkpoint.tensors("hooks").items() if name != "__empty__"})
        check_same_run(checkpoint, state.model, self.config, self._fingerprint)
        state.restore(checkpoint, new_average)
        MetricsFile(self.metrics).truncate(int(checkpoint.meta["metrics_offset"]))
        self.last_checkpoint = checkpoint.path

    def save(self, state: RunState, hooks: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint of ``state`` and of what the hooks carry.

        Raises:
            OSError: no space or the like; the earlier checkpoint stays.
            FloatingPointError: weights that are not finite.
        """
        self.last_checkpoint = save_checkpoint(
            self.checkpoints,
            state.position.step,
            {**state.parts(), "hooks": hooks},
            state.meta(self.config, self._fingerprint, MetricsFile(self.metrics).offset()),
            keep=self.config.keep,
            write_extra=lambda folder: self._describe(state.model, folder),
        )
        return self.last_checkpoint

    def write_model(self, model: nn.Module, loads: LoadTable) -> Path:
        """Write ``model/`` (weights, configuration, tokenizer) and the routing table; returns the model's folder."""
        target = self.out / "model"
        shutil.rmtree(
            target, ignore_errors=True
        )  # the last checkpoint holds the same weights until the new one is there
        with atomic_folder(target) as folder:
            weights = {name: value.detach().cpu().contiguous() for name, value in unshared(model.state_dict()).items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            self._describe(model, folder)
        tables = loads.tensors()
        if tables:
            temporary = self.out / f".tmp-routing-{os.getpid()}"
            save_file(tables, temporary)
            temporary.replace(self.out / "routing.safetensors")
        return target

    def write_report(self, report: TrainReport) -> None:
        """Write ``report.json``."""
        with atomic_file(self.out / "report.json") as file:
            file.write(json.dumps(report.as_dict(), indent=1).encode("utf-8"))

    def _describe(self, model: nn.Module, folder: Path) -> None:
        """Configuration and tokenizer, so that the folder opens as a model."""
        for name in ("config", "generation_config"):
            part = getattr(model, name, None)
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        self.task.describe(folder)


def checkpoints_of(out: Path) -> Path:
    """Folder of a run's checkpoints."""
    return out / "checkpoints"
