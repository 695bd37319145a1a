"""Listeners: metrics file, silence without a terminal, TensorBoard."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from moesaic.training import MetricsFile, ProgressLine, TensorBoard

LINE = {
    "step": 3,
    "loss": 1.5,
    "tokens_per_second": 2500.0,
    "progress": 0.5,
    "seconds_left": 75.0,
    "max_over_mean": 2.0,
}


def test_metrics_are_appended_and_cut_back(tmp_path):
    file = MetricsFile(tmp_path / "sub" / "metrics.jsonl")
    assert file.offset() == 0
    file.on_log({"step": 1})
    kept = file.offset()
    file.on_log({"step": 2})
    file.truncate(kept)
    file.on_log({"step": 3})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 3]
    with pytest.raises(ValueError):
        file.on_log({"loss": float("nan")})


def drawn(terminal):
    text = io.StringIO()
    line = ProgressLine(Console(file=text, force_terminal=terminal, width=120))
    line.on_start(0, 10, None)
    line.on_log(LINE)
    line.on_log({"step": 3, "eval_loss": 1.25, "eval_tokens": 9})
    line.on_end()
    return text.getvalue()


def test_progress_shows_loss_speed_load_and_time_left_on_a_terminal():
    shown = drawn(True)
    for part in ("loss 1.5000", "2.5k tokens/s", "busiest expert 2.0 x mean", "1:15 left", "held-out loss 1.2500"):
        assert part in shown


def test_progress_is_silent_elsewhere():
    assert drawn(False).strip() == ""


def test_tensorboard_without_the_extra_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"moesaic\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard", reason='needs pip install "moesaic[tensorboard]"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.on_log(LINE)
    board.on_end()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("loss")[0].value == 1.5
    assert "max_over_mean" in events.Tags()["scalars"]
