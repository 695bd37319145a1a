"""Imports once, then forks a child per line of stdin that trains (or goes on training) and may be killed.

A line is ``FOLDER STEPS HOW NUMBER``: HOW is ``none`` (run to the end), ``call`` (SIGKILL itself before its NUMBER-th
call of fsync, rename or unlink, most of which belong to a checkpoint being written) or ``time`` (killed after NUMBER
seconds). Answers with the exit status of the child.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.training import standin
from tests.training.test_trainer import EVERYTHING, STATEFUL, TrainConfig, Trainer

CONFIG = {**EVERYTHING, "save_every": 2, "log_every": 1}


def train(folder: Path, steps: int) -> None:
    resume = any((folder / "checkpoints").glob("step-*"))
    trainer = Trainer(standin.model(**STATEFUL), standin.data(600), TrainConfig(steps=steps, **CONFIG), out=folder)
    trainer.train(resume=resume)


def die_at_call(number: int) -> None:
    calls = itertools.count(1)

    def counted(function):
        def call(*args, **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.fsync = counted(os.fsync)
    for name in ("rename", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def child(folder: Path, steps: int, how: str, number: float) -> None:
    if how == "call":
        die_at_call(int(number))
    status = 1
    try:
        train(folder, steps)
        status = 0
    except (ValueError, OSError, RuntimeError, TypeError, AssertionError):
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), 2)  # what is imported and set up at a first step is there for every child
    for line in sys.stdin:
        folder, steps, how, number = line.split()
        pid = os.fork()
        if pid == 0:
            child(Path(folder), int(steps), how, float(number))
        if how == "time":
            time.sleep(float(number))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
