import json
import sys
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
    monkeypatch.setitem(sys.modules, "toy_module", types.SimpleNamespace(EXPERIMENT=toy()))


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
def test_the_report_states_sizes_seeds_spread_and_time(capsys: Any, tmp_path: Path) -> None:
    code, out, err = call(capsys, "reproduce", "toy", "--arm", "ours", "--seed", "0", "--results", str(tmp_path))
    assert code == 0
    assert "not measured" in out and "no rows of baseline" in out and "inconclusive" not in out
    code, out, err = call(capsys, "reproduce", "toy", "--jobs", "1", "--results", str(tmp_path))
    assert code == 0
    for words in ("Size: the default (base 1.0, noise 0.01)", "Seeds: 0, 1, 2", "standard deviation", "This run took"):
        assert words in out
    assert "5 measurements to make, 1 stored; expected to take" in err
    _, out, _ = call(capsys, "reproduce", "toy", "--json", "--results", str(tmp_path))
    assert json.loads(out)["run_seconds"] >= 0


@pytest.mark.usefixtures("toy_in_catalogue")
def test_a_dry_run_lists_the_jobs_with_their_expected_seconds(capsys: Any, tmp_path: Path) -> None:
    arguments = ("reproduce", "toy", "--dry-run", "--arm", "ours", "--jobs", "2", "--results", str(tmp_path))
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert "60.0 s  toy: ours, seed 2" in out
    assert "3 measurements, 3 min 0 s of work; expected to take 1 min 30 s, 2 at once" in out
    code, out, _ = call(capsys, *arguments, "--json")
    plan = json.loads(out)
    assert [job["seed"] for job in plan["jobs"]] == [0, 1, 2]
    assert plan["expected_seconds"] == 90
    code, out, _ = call(capsys, "reproduce", "--all", "--dry-run", "--results", str(tmp_path))
    assert code == 0
    assert out.index("star-routing: ") < out.index("dtop-p: ") < out.index("toy: ours")  # cheapest first
    assert list(tmp_path.iterdir()) == []


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
        (("reproduce", "toy", "--seeds", "2", "--seed", "1"), "not both"),
        (("reproduce", "toy", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("reproduce", "toy", "--size", "huge"), "size must be one of"),
        (("reproduce", "toy", "--dataset", "a"), "no such axis"),
        (("reproduce", "toy", "--budget", "soon"), "budget must be a time such as 2h"),
        (("reproduce", "toy", "--jobs", "0"), "--jobs must be at least 1"),
        (("reproduce",), "give --all"),
        (("reproduce", "toy", "--all"), "leave out toy"),
        (("reproduce", "--all", "--arm", "ours", "--seed", "1"), "leave out --seed, --arm"),
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
