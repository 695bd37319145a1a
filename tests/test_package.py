"""The package as something to depend on: public names, import time, versions, exit codes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic
from moesaic.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command run in this process."""
    code = 0
    try:
        main(list(argv))
    except SystemExit as leave:
        code = leave.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_every_public_name_is_there_and_documented():
    for name in moesaic.__all__:
        value = getattr(moesaic, name)
        assert name == "__version__" or value.__doc__, name


def test_the_lists_of_public_names_agree():
    assert set(moesaic._HOME) | {"__version__"} == set(moesaic.__all__)
    tree = ast.parse((ROOT / "src/moesaic/__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in ast.walk(typed) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == {name: f"moesaic.{home}" for name, home in moesaic._HOME.items()}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Rooter"):
        moesaic.Rooter  # noqa: B018


def test_import_is_cheap_and_the_version_needs_no_torch():
    code = (
        "import sys, moesaic, moesaic.cli.main\n"
        "heavy = [m for m in ('torch', 'transformers', 'matplotlib', 'sklearn') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_one_version_everywhere(capsys):
    assert run(capsys, "--version") == (0, f"moesaic {moesaic.__version__}\n", "")
    assert f"version: {moesaic.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {moesaic.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_and_speaks_json(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "--json" in out


def test_wrong_words_leave_with_2_and_one_line(capsys):
    code, out, err = run(capsys, "doctor", "--threads", "0")
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and "--threads" in err and "Traceback" not in err
    assert run(capsys, "no-such-command")[0] == 2
    assert run(capsys, "doctor", "--no-such-option")[0] == 2


def test_debug_shows_the_error(capsys):
    with pytest.raises(ValueError, match="--threads"):
        main(["doctor", "--threads", "0", "--debug"])


def test_interrupt_leaves_with_130(capsys, monkeypatch):
    from moesaic.analysis import machine

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "machine_facts", interrupt)
    assert run(capsys, "doctor")[0] == 130


def test_failure_leaves_with_1(capsys, monkeypatch):
    from moesaic.analysis import machine

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine, "machine_facts", full)
    code, _, err = run(capsys, "doctor")
    assert code == 1 and "No space left" in err


def test_doctor_json_is_one_document_on_stdout(capsys):
    code, out, _ = run(capsys, "doctor", "--quick", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["moesaic"] == moesaic.__version__
    assert isinstance(facts["slow"], list) and isinstance(facts["extras"], dict)


def test_bandwidth_probe_refuses_more_than_half_of_the_memory():
    from moesaic.analysis.machine import read_bandwidth

    with pytest.raises(ValueError, match="memory"):
        read_bandwidth(gib=1e6)
    assert read_bandwidth(gib=0.01, repeats=1) > 0


def test_the_library_prints_nothing_and_unpickles_nothing():
    for path in (ROOT / "src/moesaic").rglob("*.py"):
        if "cli" in path.relative_to(ROOT / "src/moesaic").parts:
            continue
        text = path.read_text()
        assert not re.search(r"^\s*print\(", text, re.M), path
        assert not re.search(r"^\s*(?:import|from) (?:pickle|cPickle|dill|joblib)\b", text, re.M), path
        assert not re.search(r"torch\.(?:load|save)\(", text), path
