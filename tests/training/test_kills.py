"""kill -9 at any moment, inside the write too: the resumed run ends bit for bit where the uninterrupted one does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.formats.checkpoint import latest_checkpoint
from tests.training.test_trainer import metrics, standin

ROOT = Path(__file__).parents[2]


class Server:
    """The process that forks training children."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.kill_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder, steps, how="none", number=0.0):
        self.process.stdin.write(f"{folder} {steps} {how} {number}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.process.stdin.close()
    made.process.wait(60)


def kill_and_compare(server, folder, steps, moments):
    whole, cut = folder / "whole", folder / "cut"
    assert server.run(whole, steps) == 0
    killed = 0
    for how, number in moments:
        status = server.run(cut, steps, how, number)
        assert status in (0, -9), status
        killed += status == -9
    assert server.run(cut, steps) == 0
    first, second = latest_checkpoint(whole / "checkpoints"), latest_checkpoint(cut / "checkpoints")
    assert first.step == second.step == steps
    for part in ("model", "optimizer", "average", "state", "routing", "start"):
        assert standin.same(first.tensors(part), second.tensors(part)), part
    assert metrics(whole) == metrics(cut)
    assert not list(cut.rglob(".tmp-*"))
    return killed


def test_four_kills_inside_the_write(server, tmp_path):
    assert kill_and_compare(server, tmp_path, 8, [("call", n) for n in (3, 9, 14, 25)]) == 4


@pytest.mark.slow
def test_twenty_random_kills(server, tmp_path):
    draw = random.Random(0)
    inside = [("call", draw.randint(1, 30)) for _ in range(12)]
    anywhere = [("time", round(draw.uniform(0.02, 0.8), 3)) for _ in range(8)]
    moments = inside + anywhere
    draw.shuffle(moments)
    assert kill_and_compare(server, tmp_path, 24, moments) >= 12
