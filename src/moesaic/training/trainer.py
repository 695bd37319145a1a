"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.data.packing import Batch
from moesaic.routing import Routing, end_step
from moesaic.training.averaging import WeightAverage
from moesaic.training.config import TrainConfig
from moesaic.training.diagnosis import NonFiniteError, first_non_finite_gradient, first_non_finite_layer
from moesaic.training.evaluation import evaluate_tokens
from moesaic.training.interrupts import Interrupts
from moesaic.training.memory import hold_freed_memory
from moesaic.training.metrics import make_report, step_metrics
from moesaic.training.objective import Objective, causal_lm, step_loss
from moesaic.training.observers import MetricsFile, Observer
from moesaic.training.optimizers import build_optimizers
from moesaic.training.report import TrainReport
from moesaic.training.run_files import RunFiles
from moesaic.training.run_state import RunState
from moesaic.training.schedules import schedule_factor
from moesaic.training.statistics import ExpertMovement, LoadTable
from moesaic.training.text_data import TextData

logger = logging.getLogger("moesaic.training")


class Trainer:
    """Trains a causal language model on packed text.

    A step is: ``accumulate`` micro-batches forward and backward, clipping, the optimizers, ``end_step``, the average of
    weights. With ``out`` the run writes metrics, checkpoints and the finished model, and can be resumed: bit for bit on
    the CPU when ``steps`` ends it (not when ``seconds`` does).

    Args:
        model: ours, or any causal model of transformers (those train without auxiliary losses).
        data: tokens, see :class:`TextData`.
        config: what to do.
        out: folder of the run; None writes nothing.
        observers: who listens.
        objective: gives the loss of a micro-batch.

    Raises:
        ValueError: a text shorter than a window.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TextData,
        config: TrainConfig,
        *,
        out: str | os.PathLike[str] | None = None,
        observers: Sequence[Observer] = (),
        objective: Objective = causal_lm,
    ) -> None:
        self.model = model
        self.data = data
        self.config = config
        self.objective = objective
        for stage in config.all_stages():
            data.train.windows(stage.length)
        self.files = None if out is None else RunFiles(Path(out), config, data)
        self.observers: list[Observer] = list(observers)
        if self.files is not None:
            self.observers.insert(0, MetricsFile(self.files.metrics))
        self.device = next(model.parameters()).device
        self.state = RunState(model, build_optimizers(model, config.optimizer), LoadTable(), ExpertMovement(model))
        self.notes: list[str] = []
        self._forward: nn.Module = model
        self._loss_sum: Tensor | float = 0.0
        self._clock = 0.0
        self._logged = (0, 0.0)  # tokens and seconds at the last logged line

    def train(self, *, resume: bool = False) -> TrainReport:
        """Run to the end.

        Args:
            resume: go on from the latest checkpoint in ``out``.

        Returns:
            The report.

        Raises:
            ValueError: ``out`` already holds a run and ``resume`` is off; nothing to resume; a checkpoint of another
                text, model or setting, or a damaged one.
            NonFiniteError: a loss or gradient that is not finite, with step, layer and last good checkpoint.
            KeyboardInterrupt: Ctrl-C, after the step was finished and a checkpoint saved.
            OSError: the last checkpoint or the model could not be written.
        """
        if resume and self.files is None:
            raise ValueError("resume is true and out is None: a run without a folder has nothing to resume from")
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), Interrupts() as interrupts:
            torch.manual_seed(self.config.seed)
            if self.config.hold_memory:
                hold_freed_memory()
            self._prepare()
            if self.files is not None:
                self.files.begin(resume, self.state, lambda: self._new_average())
            self._loss_sum = self.state.position.loss_sum
            self._clock = time.perf_counter() - self.state.position.elapsed
            self._logged = (self.state.position.tokens, self.state.position.elapsed)
            for observer in self.observers:
                observer.on_start(self.state.position.step, self.config.steps, self.config.seconds)
            try:
                self._loop(interrupts)
                return self._finish()
            finally:
                for observer in self.observers:
                    observer.on_end()

    # One run -----------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        self.model.train()
        if self.config.checkpointing:
            enable = getattr(self.model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ValueError(f"checkpointing is true and {type(self.model).__name__} cannot recompute activations")
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.config.compile:
            self._forward = torch.compile(self.model)  # type: ignore[assignment]

    def _loop(self, interrupts: Interrupts) -> None:
        config, position = self.config, self.state.position
        while (progress := self._progress()) < 1:
            self._take_step(progress)
            done = self._progress()
            for observer in self.observers:
                observer.on_step(position.step, done)
            if interrupts.asked:
                self._save(must=True)
                logger.warning(
                    "interrupted at step %d; saved %s", position.step, self._last_good() or "nothing: no out"
                )
                raise KeyboardInterrupt
            if done < 1:
                if config.eval_every and position.step % config.eval_every == 0:
                    self._evaluate()
                if config.save_every and position.step % config.save_every == 0:
                    self._save(must=False)

    def _take_step(self, progress: float) -> None:
        config, position, optimizers = self.config, self.state.position, self.state.optimizers
        batches = self._batches(progress)
        targets = sum(batch.num_targets for batch in batches)
        routings: Sequence[Routing] = ()
        loss_value: Tensor | float = 0.0
        for batch in batches:
            with self._errors_located(batch):
                with self._autocast():
                    loss = self._call(batch)
                total = step_loss(loss, batch, targets, config.lm, config.aux)
                total.backward()  # type: ignore[no-untyped-call]
            routings = loss.routings
            loss_value = loss_value + loss.lm_sum.detach() / targets
        self._check_loss(loss_value, batches)
        norm = optimizers.clip(config.clip) if config.clip is not None else None
        log = self._is_logged(position.step + 1)
        if norm is None and log:
            norm = optimizers.gradient_norm()
        if norm is not None and (log or self.device.type == "cpu") and not math.isfinite(float(norm)):
            raise NonFiniteError(
                position.step, "the gradient is not finite", first_non_finite_gradient(self.model), self._last_good()
            )
        optimizers.set_factor(schedule_factor(config.schedule, progress, position.step))
        optimizers.step()
        optimizers.zero_grad()
        end_step(self.model)
        position.step += 1
        position.tokens += targets
        self._loss_sum = self._loss_sum + (loss_value if self.device.type != "cpu" else float(loss_value))
        position.loss_steps += 1
        self._update_average(progress)
        if log:
            self._log(routings, float(norm) if norm is not None else None)

    def _batches(self, progress: float) -> list[Batch]:
        """The micro-batches of the next step, a function of seed, stage and step."""
        config, position = self.config, self.state.position
        stages = config.all_stages()
        while position.stage < len(stages) - 1 and progress >= stages[position.stage].until:
            position.stage += 1
            position.stage_start = position.step
        stage = stages[position.stage]
        first = (position.step - position.stage_start) * config.accumulate
        return [
            self.data.train.batch(first + i, stage.batch, stage.length, stage=position.stage).to(self.device)
            for i in range(config.accumulate)
        ]

    def _call(self, batch: Batch) -> Any:
        try:
            return self.objective(self._forward, batch)
        except Exception as error:
            if self._forward is self.model or not _is_compiler_error(error):
                raise
            self.notes.append(f"ran without torch.compile: {str(error).splitlines()[0]}")
            logger.warning(self.notes[-1])
            self._forward = self.model
            return self.objective(self._forward, batch)

    def _progress(self) -> float:
        """Share of the run that is over."""
        position, config = self.state.position, self.config
        position.elapsed = time.perf_counter() - self._clock
        shares = []
        if config.steps is not None:
            shares.append(position.step / config.steps)
        if config.seconds is not None:
            shares.append(position.elapsed / config.seconds)
        return max(shares)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # Average -----------------------------------------------------------------------------------------------------
    def _new_average(self) -> WeightAverage:
        average = self.config.average
        assert average.decay is not None
        return WeightAverage(self.model, average.decay**average.every)

    def _update_average(self, progress: float) -> None:
        average = self.config.average
        if average.decay is None or progress < average.start:
            return
        if self.state.average is None:
            self.state.average = self._new_average()
        elif self.state.position.step % average.every == 0:
            self.state.average.update()

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        if self.state.average is None or not self.config.average.use:
            return contextlib.nullcontext()
        return self.state.average.applied()

    # What is said ------------------------------------------------------------------------------------------------
    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.config.log_every == 0 or step == self.config.steps

    def _log(self, routings: Sequence[Routing], norm: float | None) -> None:
        position = self.state.position
        progress = self._progress()
        position.last_loss = float(self._loss_sum) / position.loss_steps
        self._loss_sum, position.loss_steps = 0.0, 0
        metrics = step_metrics(self.state, routings, norm, progress, since=self._logged)
        self._logged = (position.tokens, position.elapsed)
        self.state.loads.add(position.step, routings)
        self._tell(metrics)

    def _evaluate(self) -> None:
        """Loss on the held-out part; the auxiliary losses are no part of it."""
        position, config = self.state.position, self.config
        if self.data.eval_tokens is None:
            return
        stage = config.all_stages()[-1]
        with self._averaged(), self._autocast():
            found = evaluate_tokens(
                self.model,
                self.data.eval_tokens,
                length=stage.length,
                batch=stage.batch,
                most_batches=config.eval_batches,
                objective=self.objective,
            )
        position.eval_loss = found.loss
        position.best_eval = found.loss if position.best_eval is None else min(position.best_eval, found.loss)
        metrics = {"step": position.step, "eval_loss": found.loss, "eval_tokens": found.tokens}
        if self.data.tokens_per_character is not None:
            metrics["eval_loss_per_character"] = found.loss * self.data.tokens_per_character
        self._tell(metrics)

    def _tell(self, metrics: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_log(metrics)

    # What may go wrong -------------------------------------------------------------------------------------------
    def _check_loss(self, value: Tensor | float, batches: Sequence[Batch]) -> None:
        """On the CPU at every step, before anything moves; on an accelerator, where reading waits, at logged steps."""
        if self.device.type != "cpu" and not self._is_logged(self.state.position.step + 1):
            return
        if not math.isfinite(float(value)):
            self._stop(f"the loss is {float(value)}", batches)

    @contextlib.contextmanager
    def _errors_located(self, batch: Batch) -> Iterator[None]:
        """A router that refuses scores that are not finite stops the run like a loss that is not."""
        try:
            yield
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            self._stop(str(error), [batch])

    def _stop(self, what: str, batches: Sequence[Batch]) -> None:
        where = None
        for batch in batches:
            with self._autocast():
                where = where or first_non_finite_layer(self.model, self.objective, batch)
        raise NonFiniteError(
            self.state.position.step,
            what,
            where or "every layer's output is finite, the loss is not",
            self._last_good(),
        )

    def _last_good(self) -> Path | None:
        return None if self.files is None else self.files.last_checkpoint

    def _save(self, *, must: bool) -> None:
        """Write a checkpoint; a failed one in the middle of a run is reported and the run goes on."""
        if self.files is None:
            return
        position = self.state.position
        position.loss_sum = float(self._loss_sum)
        position.elapsed = time.perf_counter() - self._clock
        try:
            path = self.files.save(self.state)
        except FloatingPointError as error:
            raise NonFiniteError(position.step, str(error), "found when saving", self._last_good()) from error
        except OSError as error:
            kept = self._last_good()
            reason = f"step {position.step}: {error}; kept {kept if kept else 'nothing: there is no earlier one'}"
            position.failed_saves.append(reason)
            logger.error("checkpoint not written at %s", reason)
            if must:
                raise OSError(error.errno, f"checkpoint not written at {reason}") from error
            return
        for observer in self.observers:
            observer.on_checkpoint(path)

    def _finish(self) -> TrainReport:
        position = self.state.position
        if position.loss_steps:
            position.last_loss = float(self._loss_sum) / position.loss_steps
        self._evaluate()
        self._save(must=True)
        model = None
        if self.files is not None:
            with self._averaged():
                model = self.files.write_model(self.model, self.state.loads)
        metrics = None if self.files is None else self.files.metrics
        report = make_report(self.state, checkpoint=self._last_good(), model=model, metrics=metrics, notes=self.notes)
        if self.files is not None:
            self.files.write_report(report)
        return report


def _is_compiler_error(error: BaseException) -> bool:
    """Whether torch.compile failed for want of a working C++ compiler, which shows at the first call."""
    seen: BaseException | None = error
    while seen is not None:
        if "InvalidCxxCompiler" in type(seen).__name__ or "InvalidCxxCompiler" in str(seen):
            return True
        seen = seen.__cause__ or getattr(seen, "inner_exception", None)
    return False
