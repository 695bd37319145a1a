"""Run jobs in this process or in several, and hand back each outcome as it comes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from moesaic.experiments.base import Measure, Outcome
from moesaic.experiments.schedule import Job, Queue

Result = tuple[Job, Outcome | Exception, float]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def run_jobs(queue: Queue, workers: int | None = None) -> Iterator[Result]:
    """Outcomes of the queue's jobs as they finish, an exception in place of an outcome where one failed.

    Leaving the loop early, also by Ctrl-C, ends the workers at once: nothing goes on in the background.

    Args:
        queue: what to run.
        workers: measurements at once; by default as many as the cores hold, each with its experiment's threads.

    Yields:
        Job, outcome or exception, seconds.

    Raises:
        ValueError: workers below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"jobs must be at least 1, got {workers}")
    many = cores() if workers is None else workers
    if many == 1 or len(queue.left) < 2:
        while (job := queue.take()) is not None:
            yield job, *_guarded(_arguments(job))
        return
    # Threads are counted only where the user does not say how many measurements he wants.
    with _Pool(many, count_threads=workers is None) as pool:
        yield from pool.run(queue)


def timed(function: Measure, settings: Mapping[str, Any], seed: int, threads: int) -> tuple[Outcome, float]:
    """One measurement with its number of torch threads; the outcome and the seconds it took."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start = time.perf_counter()
        outcome = function(settings, seed)
        return outcome, time.perf_counter() - start
    finally:
        torch.set_num_threads(before)


_Arguments = tuple[Measure, dict[str, Any], int, int]


def _arguments(job: Job) -> _Arguments:
    experiment = job.experiment
    return experiment.measure, experiment.settings_of(job.arm, dataset=job.dataset), job.seed, experiment.threads


def _guarded(arguments: _Arguments) -> tuple[Outcome | Exception, float]:
    start = time.perf_counter()
    try:
        return timed(*arguments)
    except Exception as error:  # noqa: BLE001 - handed to whoever reads the outcomes
        return error, time.perf_counter() - start


class _Worker:
    """A process that measures one job after another; it ends when its pipe does."""

    def __init__(self) -> None:
        # spawn: a fork of a process that runs torch threads can hang.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _ctrl_c_held_back():
            self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.gone = False

    def start(self, job: Job) -> None:
        """Send a job; its result can be received later."""
        self.job = job
        self.connection.send(_arguments(job))

    def finish(self) -> Result:
        """The result of the job that was sent; an error where the process is gone."""
        assert self.job is not None
        job, self.job = self.job, None
        try:
            outcome, seconds = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            self.gone = True
            code = self.process.exitcode
            return job, RuntimeError(f"its process is gone (exit code {code}; -9 is often a lack of memory)"), 0.0
        return job, outcome, seconds

    def end(self) -> None:
        """End the process now."""
        self.connection.close()
        self.process.terminate()
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Pool:
    def __init__(self, slots: int, count_threads: bool) -> None:
        self.slots, self.count_threads = slots, count_threads
        self.workers: list[_Worker] = []

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def run(self, queue: Queue) -> Iterator[Result]:
        while True:
            self._fill(queue)
            busy = {worker.connection: worker for worker in self.workers if worker.job is not None}
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker = busy[ready]
                result = worker.finish()
                if worker.gone:
                    worker.end()
                    self.workers.remove(worker)
                yield result

    def _fill(self, queue: Queue) -> None:
        while (job := queue.take(self._free())) is not None:
            idle = next((worker for worker in self.workers if worker.job is None), None)
            if idle is None:
                idle = _Worker()
                self.workers.append(idle)
            idle.start(job)

    def _free(self) -> int | None:
        """Threads that a job may still use; None where nothing runs, so that a job of many threads runs alone."""
        running = [worker.job for worker in self.workers if worker.job is not None]
        if not self.count_threads:
            return None if len(running) < self.slots else 0
        return self.slots - sum(job.experiment.threads for job in running) if running else None


def _serve(connection: Connection) -> None:
    # The parent decides what Ctrl-C means; it reaches every process of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            outcome, seconds = _guarded(connection.recv())
            connection.send((_sendable(outcome), seconds))


def _sendable(outcome: Outcome | Exception) -> Outcome | Exception:
    """Exceptions of libraries may not survive the pipe; one of Python's own with the same text does."""
    if not isinstance(outcome, Exception):
        return outcome
    for kind in (ImportError, FileNotFoundError, ValueError, TypeError):  # bad input, not a failure
        if isinstance(outcome, kind):
            return kind(str(outcome))
    plain = type(outcome) is RuntimeError
    return RuntimeError(str(outcome) if plain else f"{type(outcome).__name__}: {outcome}")


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """A process started in here is born with SIGINT blocked: no traceback of it while it imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
