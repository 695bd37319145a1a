import json
import types
from pathlib import Path
from typing import Any

import pytest

from moesaic import catalog
from moesaic.cli.main import main
from moesaic.experiments import run
from tests.experiments.toy import toy


def call(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def toy_in_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    method = catalog.Method("toy", "A Toy", "2601.00001", "routing", "a toy", ("routing:TopKRouter",), "toy_module")
    monkeypatch.setattr(catalog, "METHODS", (*catalog.METHODS, method))
    real = run.importlib.import_module
    module = types.SimpleNamespace(EXPERIMENT=toy())
    monkeypatch.setattr(run.importlib, "import_module", lambda name: module if name == "toy_module" else real(name))


def test_methods_lists_all_systems(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = call(capsys, "methods", "--json", "--results", str(tmp_path))
    entries = {entry["slug"]: entry for entry in json.loads(out)["methods"]}
    assert code == 0
    assert len(entries) == 38
    assert entries["star-routing"]["status"] == "ready"
    assert entries["star-routing"]["arxiv"] == "2606.08814"
    assert "moesaic.routing.PrincipalSubspaceRouter" in entries["star-routing"]["names"]
    assert entries["star-routing"]["verdict"] is None
    code, out, _ = call(capsys, "methods", "--results", str(tmp_path))
    assert code == 0
    assert "dtop-p" in out


@pytest.mark.usefixtures("toy_in_catalogue")
def test_reproduce_writes_prints_and_fills(capsys: Any, tmp_path: Path) -> None:
    results = str(tmp_path / "results")
    code, out, err = call(capsys, "reproduce", "toy", "--jobs", "1", "--results", results)
    assert code == 0
    assert "0.803 ± 0.021" in out
    assert "met" in out
    assert "6 measurements to make" in err
    code, out, err = call(capsys, "reproduce", "toy", "--jobs", "1", "--results", results, "--json")
    assert "0 measurements to make, 6 stored" in err
    document = json.loads(out)
    assert document["command"] == "moesaic reproduce toy"
    assert document["verdict"][0]["status"] == "met"
    code, out, _ = call(capsys, "methods", "--json", "--results", results)
    assert json.loads(out)["methods"][-1]["verdict"] == {"met": 1}
    code, table, _ = call(capsys, "methods", "--table", "toy", "--results", results)
    assert "| ours | 3 |" in table
    page = tmp_path / "page.md"
    page.write_text("<!-- results:toy -->\n<!-- end of results -->\n")
    for changed in ("1 changed", "0 changed"):
        code, _, err = call(capsys, "methods", "--fill", str(page), "--results", results)
        assert changed in err
    assert table in page.read_text()


@pytest.mark.usefixtures("toy_in_catalogue")
def test_a_quick_run_writes_nothing(capsys: Any, tmp_path: Path) -> None:
    results = tmp_path / "results"
    code, out, _ = call(capsys, "reproduce", "toy", "--quick", "--results", str(results))
    assert code == 0
    assert "nothing is written" in out
    code, out, _ = call(capsys, "reproduce", "toy", "--quick", "--json", "--results", str(results))
    assert json.loads(out)["verdict"] is None
    assert len(json.loads(out)["rows"]) == 2
    assert not results.exists()


@pytest.mark.usefixtures("toy_in_catalogue")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("reproduce", "nothing"), "slug must be one of"),
        (("reproduce", "usmoe"), "no experiment yet"),
        (("reproduce", "toy", "--quick", "--seeds", "2"), "--quick runs each arm once"),
        (("reproduce", "toy", "--arm", "nobody"), "no arm 'nobody'"),
        (("reproduce", "toy", "--seeds", "0"), "seeds must be at least 1"),
        (("methods", "--table", "toy"), "does not exist"),
        (("methods", "--table", "nothing"), "slug must be one of"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(capsys: Any, tmp_path: Path, arguments, said: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = call(capsys, *arguments, "--results", str(tmp_path))
    assert code == 2
    assert said in err
    assert err.strip().count("\n") == 0
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("toy_in_catalogue")
def test_rows_of_another_configuration_end_in_exit_code_2(capsys: Any, tmp_path: Path) -> None:
    run.reproduce(toy(version=7), tmp_path, jobs=1)
    code, _, err = call(capsys, "reproduce", "toy", "--results", str(tmp_path))
    assert code == 2
    assert "version 7 -> 1" in err
