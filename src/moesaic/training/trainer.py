"""The training engine: one loop for every task."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.routing import Routing, end_step
from moesaic.training.averaging import WeightAverage
from moesaic.training.causal_lm import CausalLM
from moesaic.training.config import TrainConfig
from moesaic.training.diagnosis import NonFiniteError, first_non_finite_gradient, first_non_finite_layer
from moesaic.training.early_stopping import EarlyStopping
from moesaic.training.execution import Execution
from moesaic.training.hooks import Hook, check_hooks
from moesaic.training.interrupts import Interrupts
from moesaic.training.memory import hold_freed_memory
from moesaic.training.metrics import make_report, step_metrics
from moesaic.training.observers import MetricsFile, Observer
from moesaic.training.optimizers import Optimizers, build_optimizers
from moesaic.training.report import TrainReport
from moesaic.training.run_files import RunFiles
from moesaic.training.run_state import RunState
from moesaic.training.schedules import schedule_factor
from moesaic.training.statistics import ExpertMovement, LoadTable
from moesaic.training.task import Step, Task, step_loss
from moesaic.training.text_data import TextData

logger = logging.getLogger("moesaic.training")


class Trainer:
    """Trains a model on a task.

    A step is: the task's micro-batches forward and backward, clipping, hooks, the optimizers, ``end_step``, the average
    of weights, hooks. With ``out`` the run writes metrics, checkpoints and the finished model, and can be resumed: bit
    for bit on the CPU when ``steps`` ends it (not when ``seconds`` does).

    Args:
        model: any module that the task can call; its auxiliary losses come back with its routings.
        task: what is trained; a :class:`TextData` stands for causal language modelling on it.
        config: what to do.
        out: folder of the run; None writes nothing.
        observers: who listens.
        hooks: what methods add.
        optimizers: makes the optimizers of a model, now and after growth; from ``config.optimizer`` by default.
        schedule: ``(progress, step) -> factor`` on all learning rates; from ``config.schedule`` by default.
        execution: ``(model, config) -> Execution``: how a step is computed.

    Attributes:
        state: all moving parts of the run.
        step_loss: mean loss of the last step, a float on the CPU.

    Raises:
        ValueError: what the task refuses; two hooks of one name.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task[Any] | TextData,
        config: TrainConfig,
        *,
        out: str | os.PathLike[str] | None = None,
        observers: Sequence[Observer] = (),
        hooks: Sequence[Hook] = (),
        optimizers: Callable[[nn.Module], Optimizers] | None = None,
        schedule: Callable[[float, int], float] | None = None,
        execution: Callable[[nn.Module, TrainConfig], Execution] = Execution,
    ) -> None:
        self.model = model
        self.task: Task[Any] = CausalLM(task) if isinstance(task, TextData) else task
        self.config = config
        self.task.check(config)
        self.hooks = list(hooks)
        check_hooks(self.hooks)
        self.files = None if out is None else RunFiles(Path(out), config, self.task)
        self.observers: list[Observer] = list(observers)
        if self.files is not None:
            self.observers.insert(0, MetricsFile(self.files.metrics))
        self.execution = execution(model, config)
        self._build = optimizers or (lambda model: build_optimizers(model, config.optimizer))
        self._factor = schedule or (lambda progress, step: schedule_factor(config.schedule, progress, step))
        self.state = RunState(model, self._build(model), LoadTable(), ExpertMovement(model))
        self.early_stopping = None if config.early_stopping is None else EarlyStopping(config.early_stopping)
        self.step_loss: Tensor | float = 0.0
        self._loss_sum: Tensor | float = 0.0
        self._clock = 0.0
        self._logged = (0, 0.0)  # items and seconds at the last logged line

    def train(self, *, resume: bool = False) -> TrainReport:
        """Run to the end.

        Args:
            resume: go on from the latest checkpoint in ``out``.

        Returns:
            The report.

        Raises:
            ValueError: ``out`` already holds a run and ``resume`` is off; nothing to resume; a checkpoint of other
                data, another model or setting, or a damaged one.
            NonFiniteError: a loss or gradient that is not finite, with step, layer and last good checkpoint.
            KeyboardInterrupt: Ctrl-C, after the step was finished and a checkpoint saved.
            OSError: the last checkpoint or the model could not be written.
        """
        if resume and self.files is None:
            raise ValueError("resume is true and out is None: a run without a folder has nothing to resume from")
        device = self.execution.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), Interrupts() as interrupts:
            torch.manual_seed(self.config.seed)
            if self.config.hold_memory:
                hold_freed_memory()
            self.execution.prepare()
            if self.files is not None:
                self.files.begin(resume, self.state, self._new_average, self._load_hooks)
            position = self.state.position
            self._loss_sum = position.loss_sum
            self._clock = time.perf_counter() - position.elapsed
            self._logged = (position.items, position.elapsed)
            for hook in self.hooks:
                hook.on_start(self)
            for observer in self.observers:
                observer.on_start(position.step, self.config.steps, self.config.seconds)
            try:
                self._loop(interrupts)
                return self._finish()
            finally:
                for observer in self.observers:
                    observer.on_end()

    def model_changed(self, carry: Callable[[Optimizers, Optimizers], None] | None = None) -> None:
        """Go on with a model whose structure a hook has changed in place: other parameters, other shapes.

        Optimizers are built anew, the average of weights starts again, hooks hear of it.

        Args:
            carry: ``(old, new)`` moves optimizer state; by default the state of parameters that are still the same
                objects of the same shape goes along, and that of the others starts at zero.
        """
        old, new = self.state.optimizers, self._build(self.model)
        (carry or Optimizers.carry)(old, new)
        self.state.optimizers = new
        self.state.movement = ExpertMovement(self.model)
        self.state.best = {}
        if self.state.average is not None:
            self.state.average = self._new_average()
        for hook in self.hooks:
            hook.on_growth(self)

    # One run -----------------------------------------------------------------------------------------------------
    def _loop(self, interrupts: Interrupts) -> None:
        config, position = self.config, self.state.position
        stopping = self.early_stopping
        while (progress := self._progress()) < 1 and not (stopping and stopping.over(position)):
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
        batches = [self.task.move(batch, self.execution.device) for batch in self.task.batches(self._step(progress))]
        count = int(self.execution.over_ranks(sum(self.task.count(batch) for batch in batches)))
        routings: Sequence[Routing] = ()
        value: Tensor | float = 0.0
        more: dict[str, Tensor | float] = {}
        for batch in batches:
            with self._errors_located(batch):
                loss = self.execution.loss(self.task, batch)
                total = step_loss(loss, self.task.count(batch), count, config.main, config.aux)
                total.backward()  # type: ignore[no-untyped-call]
            routings = loss.routings
            value = value + loss.total.detach() / count
            for name, part in loss.metrics.items():
                more[name] = more.get(name, 0.0) + part / count
        self.step_loss = self._checked_loss(value, batches)
        log = self._is_logged(position.step + 1)
        norm = self._clipped_norm(log)
        for hook in self.hooks:
            hook.before_step(self, routings)
        optimizers.set_factor(self._factor(progress, position.step))
        optimizers.step()
        optimizers.zero_grad()
        end_step(self.model)
        position.step += 1
        position.items += count
        self._loss_sum = self._loss_sum + self.step_loss
        position.loss_steps += 1
        self._update_average(progress)
        for hook in self.hooks:
            hook.after_step(self)
        if log:
            self._log(routings, norm, more)

    def _step(self, progress: float) -> Step:
        """The numbers from which the task makes the next step's batches."""
        config, position = self.config, self.state.position
        stages = config.all_stages()
        while position.stage < len(stages) - 1 and progress >= stages[position.stage].until:
            position.stage += 1
            position.stage_start = position.step
        first = (position.step - position.stage_start) * config.accumulate
        return Step(position.step, position.stage, first, config.accumulate, stages[position.stage])

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

    # Average and hooks -------------------------------------------------------------------------------------------
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

    def _hook_states(self) -> dict[str, Tensor]:
        return {f"{hook.name}/{key}": value for hook in self.hooks for key, value in hook.state().items()}

    def _load_hooks(self, tensors: Mapping[str, Tensor]) -> None:
        known = {hook.name for hook in self.hooks}
        unknown = sorted({name.partition("/")[0] for name in tensors} - known)
        if unknown:
            raise ValueError(f"the checkpoint holds state of the hooks {unknown}, this run has {sorted(known)}")
        for hook in self.hooks:
            prefix = f"{hook.name}/"
            mine = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            hook.load_state(self, mine)

    # What is said ------------------------------------------------------------------------------------------------
    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.config.log_every == 0 or step == self.config.steps

    def _log(self, routings: Sequence[Routing], norm: float | None, more: Mapping[str, Tensor | float]) -> None:
        position = self.state.position
        progress = self._progress()
        position.last_loss = float(self._loss_sum) / position.loss_steps
        self._loss_sum, position.loss_steps = 0.0, 0
        numbers = {name: float(value) for name, value in more.items()}
        metrics = step_metrics(self.state, routings, norm, progress, self._logged, self.task.unit, numbers)
        self._logged = (position.items, position.elapsed)
        self.state.loads.add(position.step, routings)
        self._tell(metrics)

    def _evaluate(self) -> None:
        """Loss on the held-out part; the auxiliary losses are no part of it."""
        position = self.state.position
        with self._averaged(), self.execution.autocast():
            found = self.task.evaluate(self.model, self.config)
            if found is None:
                if self.early_stopping is not None:
                    raise ValueError("early_stopping needs held-out data, and the task has none to evaluate on")
                return
            if self.early_stopping is not None:
                self.early_stopping.see(found.loss, self.state)
        position.eval_loss = found.loss
        position.best_eval = found.loss if position.best_eval is None else min(position.best_eval, found.loss)
        more = {f"eval_{name}": value for name, value in found.metrics.items()}
        self._tell({"step": position.step, "eval_loss": found.loss, f"eval_{self.task.unit}": found.count, **more})

    def _tell(self, metrics: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_log(metrics)

    # What may go wrong -------------------------------------------------------------------------------------------
    def _checked_loss(self, value: Tensor | float, batches: Sequence[Any]) -> Tensor | float:
        """On the CPU read and checked at every step, before anything moves; on an accelerator, where reading waits, at
        logged steps."""
        on_cpu = self.execution.device.type == "cpu"
        if (on_cpu or self._is_logged(self.state.position.step + 1)) and not math.isfinite(float(value)):
            self._stop(f"the loss is {float(value)}", batches)
        return float(value) if on_cpu else value

    def _clipped_norm(self, log: bool) -> float | None:
        """Clip as configured; the norm before it where it was computed and may be read."""
        clip, optimizers = self.config.clip, self.state.optimizers
        norm = optimizers.clip(clip) if clip is not None else optimizers.gradient_norm() if log else None
        if norm is None or not (log or self.execution.device.type == "cpu"):
            return None
        if not math.isfinite(float(norm)):
            where = first_non_finite_gradient(self.model)
            raise NonFiniteError(self.state.position.step, "the gradient is not finite", where, self._last_good())
        return float(norm)

    @contextlib.contextmanager
    def _errors_located(self, batch: Any) -> Iterator[None]:
        """A router that refuses scores that are not finite stops the run like a loss that is not."""
        try:
            yield
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            self._stop(str(error), [batch])

    def _stop(self, what: str, batches: Sequence[Any]) -> None:
        where = None
        for batch in batches:
            with self.execution.autocast():
                where = where or first_non_finite_layer(self.model, self.task, batch)
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
        if self.files is None or not self.execution.writes:
            return
        position = self.state.position
        position.loss_sum = float(self._loss_sum)
        position.elapsed = time.perf_counter() - self._clock
        try:
            path = self.files.save(self.state, self._hook_states())
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
        with self._averaged():
            if self.early_stopping is not None:
                self.early_stopping.restore(self.state)
            model = None if self.files is None else self.files.write_model(self.model, self.state.loads)
        metrics = None if self.files is None else self.files.metrics
        report = make_report(
            self.state,
            self.task,
            checkpoint=self._last_good(),
            model=model,
            metrics=metrics,
            notes=self.execution.notes,
        )
        if self.files is not None:
            self.files.write_report(report)
        return report
