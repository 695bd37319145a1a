"""Ctrl-C ends a command with exit code 130 and one line, whenever it comes: from the package's first import on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moesaic
from moesaic.cli.interrupts import _importer

SOURCE = Path(moesaic.__file__).parents[1]
CONSOLE_SCRIPT = "import sys; sys.argv[0] = 'moesaic'\nfrom moesaic.cli.main import main\nmain()"


def _default_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it may be ignored


def _interrupted(command: list[str], delay: float, folder: Path) -> tuple[int, list[str], bool]:
    """Exit code and lines of a process that gets SIGINT ``delay`` seconds after the package's first module is there.

    ``-X importtime`` says on stderr when that is; before, only Python itself is running.
    """
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        preexec_fn=_default_ctrl_c,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(" moesaic._start"):
            break
    time.sleep(delay)
    running = process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, [line for line in err.splitlines() if not line.startswith("import time:")], running


COMMANDS = {
    "module": ["-m", "moesaic", "doctor"],
    "main": ["-m", "moesaic.cli.main", "doctor"],
    "console script": ["-c", CONSOLE_SCRIPT, "quickstart", "--out", "run"],
    "reproduce": ["-m", "moesaic", "reproduce", "dtop-p", "--jobs", "1", "--results", "results"],
}
MOMENTS = [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0]


@pytest.mark.parametrize("name", COMMANDS)
def test_one_line_and_130_from_the_first_import_on(name: str, tmp_path: Path) -> None:
    hit = 0
    for delay in MOMENTS if name != "main" else MOMENTS[:4]:
        code, lines, running = _interrupted(COMMANDS[name], delay, tmp_path)
        if not running:  # a fast machine: it was done
            assert code == 0, (delay, code, lines)
            continue
        hit += 1
        assert code == 130, (delay, code, lines)
        progress = [line for line in lines if not line.startswith("moesaic: ")]
        assert [line for line in lines if line not in progress], (delay, lines)
        assert len(lines) - len(progress) == 1, (delay, lines)
        assert lines[-1].startswith("moesaic: interrupted"), (delay, lines)
        assert not any("Traceback" in line or "Error" in line or "ignored" in line for line in progress), (delay, lines)
        if delay < 0.8:
            assert progress == [], (delay, progress)
    assert hit >= 4


def test_the_library_leaves_ctrl_c_alone() -> None:
    code = "import signal, moesaic, moesaic.cli.main\nassert signal.getsignal(2) is signal.default_int_handler"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, preexec_fn=_default_ctrl_c)


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "moesaic", "--version"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert process.stdout.split() == ["moesaic", moesaic.__version__]


def test_an_import_in_progress_is_seen_with_who_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_during_import.py").write_text(
        "import sys\nfrom moesaic.cli.interrupts import _importer\nSEEN = _importer(sys._getframe())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _importer(sys._getframe()) is None
    import asks_during_import  # type: ignore[import-not-found]

    assert __name__ == asks_during_import.SEEN
    monkeypatch.delitem(sys.modules, "asks_during_import")
