"""The engine: jobs over arms, seeds and data sets, budgets, interruption, sizes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from moesaic import catalog
from moesaic.experiments import Arm, Criterion, Size, on, run
from moesaic.experiments.pool import run_jobs
from moesaic.experiments.schedule import Job, Queue, clock, duration, expected_seconds, missing_jobs, wall_seconds
from moesaic.experiments.store import ResultsFile, read_results
from moesaic.experiments.tables import results_markdown
from tests.experiments import toy as toy_module
from tests.experiments.toy import places, sleepy, toy

ROOT = Path(__file__).resolve().parents[2]
SMALLER_ON_A = Criterion(
    "smaller on a",
    "ours on a below the baseline on b",
    (on("ours", "a"), on("baseline", "b")),
    lambda m: m[on("ours", "a")]["loss"] - m[on("baseline", "b")]["loss"],
    "<",
    0.0,
)


def keys(document: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    return [(row["arm"], row.get("dataset"), row["seed"]) for row in document["rows"]]


def test_each_arm_seed_and_data_set_is_a_row_written_at_once(tmp_path: Path) -> None:
    seen: list[int] = []

    def watching(settings: Any, seed: int) -> Any:
        seen.append(len(read_results(tmp_path / "toy.json")["rows"]) if (tmp_path / "toy.json").exists() else 0)
        return places(settings, seed)

    experiment = toy(datasets=("a", "b"), measure=watching, criteria=(*toy().criteria, SMALLER_ON_A))
    document = run.reproduce(experiment, tmp_path, jobs=1)
    assert seen == list(range(12))
    assert keys(document) == [(arm, d, s) for arm in ("ours", "baseline") for d in ("a", "b") for s in (0, 1, 2)]
    assert len({row["fingerprint"] for row in document["rows"]}) == 4  # one an arm and data set
    mean = document["summary"]["ours"]["loss"]["mean"]
    each = [document["by_dataset"][name]["ours"]["loss"]["mean"] for name in ("a", "b")]
    assert mean == pytest.approx(sum(each) / 2)
    assert each[1] - each[0] == pytest.approx(1.0)
    assert document["summary"]["ours"]["loss"]["seeds"] == 3
    by_name = {entry["name"]: entry for entry in document["verdict"]}
    assert by_name["better"]["value"] == pytest.approx(-0.2)
    assert by_name["smaller on a"]["value"] == pytest.approx(-1.2)
    text = results_markdown(document)
    assert "| loss (nats) | a | b |" in text
    assert "Data sets: a, b" in text
    assert run.reproduce(experiment, tmp_path, jobs=1)["rows"] == document["rows"]
    assert len(seen) == 12


def test_an_arm_without_all_data_sets_has_no_average_and_its_claim_is_not_measured(tmp_path: Path) -> None:
    experiment = toy(datasets=("a", "b"), measure=places, criteria=(*toy().criteria, SMALLER_ON_A))
    document = run.reproduce(experiment, tmp_path, datasets=["a"], jobs=1)
    assert {row["dataset"] for row in document["rows"]} == {"a"}
    assert document["summary"] == {}
    assert document["by_dataset"]["a"]["ours"]["loss"]["seeds"] == 3
    assert [entry["status"] for entry in document["verdict"]] == ["not measured", "not measured"]
    assert document["verdict"][1]["reason"] == "no rows of baseline [b]"
    assert (tmp_path / "toy.narrow.png").exists()
    document = run.reproduce(experiment, tmp_path, jobs=1)
    assert [entry["status"] for entry in document["verdict"]] == ["met", "met"]
    with pytest.raises(ValueError, match=r"no data set 'c'; its data sets are \['a', 'b'\]"):
        run.reproduce(experiment, tmp_path, datasets=["c"])
    with pytest.raises(ValueError, match="no such axis"):
        run.reproduce(toy(), tmp_path / "other", datasets=["a"])


def test_fingerprints_of_experiments_without_data_sets_are_what_they_were() -> None:
    for path in sorted((ROOT / "results").glob("*.json")):
        document = read_results(path)
        experiment = run.load_experiment(document["slug"]).at(document.get("size"))
        for row in document["rows"]:
            assert row["fingerprint"] == experiment.fingerprint(experiment.arm(row["arm"]), row.get("dataset"))
    assert toy().fingerprint(toy().arms[0]) == "4abf62e3e493"


def test_arms_and_seeds_select(tmp_path: Path) -> None:
    document = run.reproduce(toy(), tmp_path, arms=["ours"], only_seeds=[7, 1, 7], jobs=1)
    assert keys(document) == [("ours", None, 1), ("ours", None, 7)]
    assert document["verdict"][0]["status"] == "not measured"
    assert document["verdict"][0]["reason"] == "no rows of baseline"
    assert "**not measured** (no rows of baseline)" in results_markdown(document)
    document = run.reproduce(toy(), tmp_path, arms=["baseline"], only_seeds=[1], jobs=1)
    assert (document["verdict"][0]["status"], document["verdict"][0]["reason"]) == (
        "not measured",
        "one seed has no spread",
    )
    assert document["verdict"][0]["value"] == pytest.approx(-0.2)
    for arguments, said in (({"seeds": 2, "only_seeds": [1]}, "not both"), ({"only_seeds": [-1]}, "got -1")):
        with pytest.raises(ValueError, match=said):
            run.reproduce(toy(), tmp_path, **arguments)  # type: ignore[arg-type]


def test_a_size_has_settings_seeds_and_a_file_of_its_own(tmp_path: Path) -> None:
    arms = (Arm("ours", {"shift": -0.2, "noise": 0.02}), Arm("baseline", {"shift": 0.0}))
    experiment = toy(arms=arms, sizes={"large": Size({"base": 3.0, "noise": 0.05}, seeds=(0, 1), seconds=500.0)})
    run.reproduce(experiment, tmp_path, jobs=1)
    before = (tmp_path / "toy.json").read_bytes()
    large = experiment.at("large")
    document = run.reproduce(large, tmp_path, jobs=1)
    assert (tmp_path / "toy.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.glob("toy.large*")) == [
        "toy.large.json",
        "toy.large.narrow.png",
        "toy.large.png",
    ]
    assert document["size"] == "large"
    assert document["settings"]["base"] == 3.0
    assert document["arms"][0]["settings"] == {"shift": -0.2, "noise": 0.05}  # over the arm's own, too
    assert {row["seed"] for row in document["rows"]} == {0, 1}
    assert document["summary"]["baseline"]["loss"]["mean"] == pytest.approx(3.0, abs=0.2)
    assert "Size: large (base 3.0, noise 0.05)." in results_markdown(document)
    assert expected_seconds(large, large.arms[0], None, []) == 500.0
    with pytest.raises(ValueError, match=r"one of \['large'\] for toy, got 'huge'"):
        experiment.at("huge")
    with pytest.raises(ValueError, match="must be a word"):
        toy(sizes={"a/b": Size({})})
    (tmp_path / "toy.large.json").write_bytes(before)
    with pytest.raises(ValueError, match="holds size None of toy, not 'large'"):
        run.reproduce(large, tmp_path, jobs=1)


def test_expected_seconds_come_from_the_nearest_stored_rows(tmp_path: Path) -> None:
    experiment = toy(arms=(Arm("ours", {"shift": -0.2}), Arm("baseline", {"shift": 0.0}, seconds=7.0)), seconds=9.0)
    results = ResultsFile(experiment, tmp_path)
    ours, baseline = experiment.arms
    assert expected_seconds(experiment, ours, None, []) == 9.0
    assert expected_seconds(experiment, baseline, None, []) == 7.0
    for seed, seconds in enumerate((300.0, 40.0, 44.0)):  # a busy machine once
        results.add(ours, seed, toy_module.measure(experiment.settings_of(ours), seed), seconds, "c")
    assert expected_seconds(experiment, ours, None, results.rows) == 44.0
    assert expected_seconds(experiment, baseline, None, results.rows) == 7.0
    todo = missing_jobs(results, (0, 1, 2, 3))
    assert [(str(job), job.seconds) for job in todo] == [
        *((f"baseline, seed {seed}", 7.0) for seed in (0, 1, 2)),
        ("ours, seed 3", 44.0),
        ("baseline, seed 3", 7.0),
    ]
    assert wall_seconds(todo, 2) == 44.0  # never less than the longest
    assert wall_seconds(todo, 1) == 72.0


def test_no_job_starts_that_does_not_fit_and_expectations_learn() -> None:
    now = [0.0]
    experiment = toy()
    jobs = [Job(experiment, experiment.arms[0], seed, None, seconds) for seed, seconds in enumerate((10, 20, 30, 5))]
    queue = Queue(jobs, budget=60.0, now=lambda: now[0])
    first = queue.take()
    assert first is not None and first.seconds == 10
    now[0] = 20.0
    queue.done(first, 20.0)  # twice as slow as expected: 20 takes 40 and ends at 60, 30 does not fit
    second = queue.take()
    assert second is not None and second.seconds == 20
    now[0] = 45.0
    third = queue.take()
    assert third is not None and third.seconds == 5  # passes over the one of 30
    assert queue.take() is None
    assert [job.seconds for job in queue.left] == [30]
    assert Queue(jobs, budget=1.0).take() is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("1h30m", 5400), ("45m", 2700), ("90s", 90), ("90", 90), ("1.5h", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "2d", "-1h", "h", "1h2", "soon", "0m"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="budget must be a time such as 2h"):
        duration(text)


def test_clock() -> None:
    assert [clock(s) for s in (0.2, 59, 250, 7500)] == ["0 s", "59 s", "4 min 10 s", "2 h 5 min"]


@pytest.fixture
def two_systems(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A catalogue of a cheap and a dear system, one of whose arms fails."""

    def failing(settings: Any, seed: int) -> Any:
        if settings["shift"] == 0.0:
            raise ImportError('needs a peer: pip install "moesaic[peers]"')
        return toy_module.measure(settings, seed)

    found = {"dear": toy(slug="dear", seconds=50.0, measure=failing), "cheap": toy(slug="cheap", seconds=1.0)}
    for slug, experiment in found.items():
        monkeypatch.setitem(sys.modules, f"{slug}_module", types.SimpleNamespace(EXPERIMENT=experiment))
    methods = tuple(
        catalog.Method(slug, slug, None, "routing", "a toy", ("routing:TopKRouter",), f"{slug}_module")
        for slug in found
    )
    monkeypatch.setattr(catalog, "METHODS", (*methods, catalog.Method("planned", "p", None, "routing", "none yet")))
    return found


def test_all_takes_the_missing_rows_of_every_system_cheapest_first(two_systems: Any, tmp_path: Path) -> None:
    run.reproduce(two_systems["cheap"], tmp_path, only_seeds=[1], jobs=1)
    plan = run.reproduce_all(tmp_path, jobs=1, dry_run=True)
    assert [job["slug"] for job in plan["jobs"]] == ["cheap"] * 4 + ["dear"] * 6
    assert plan["expected_seconds"] == pytest.approx(300.0, abs=5)
    assert not (tmp_path / "dear.json").exists()
    lines: list[str] = []
    found = run.reproduce_all(tmp_path, jobs=1, progress=lines.append)
    # The failing arm is named once and costs the other rows nothing.
    assert [(failure["slug"], failure["arm"]) for failure in found["failed"]] == [("dear", "baseline")]
    assert "moesaic[peers]" in found["failed"][0]["error"]
    assert any("2 more of this arm left out" in line for line in lines)
    state = {system["slug"]: system for system in found["systems"]}
    assert (state["cheap"]["stored"], state["cheap"]["missing"], state["cheap"]["verdict"]) == (6, 0, {"met": 1})
    assert (state["dear"]["stored"], state["dear"]["missing"], state["dear"]["verdict"]) == (3, 3, {"not measured": 1})
    assert read_results(tmp_path / "cheap.json")["command"] == "moesaic reproduce cheap"
    assert (tmp_path / "dear.narrow.png").exists()


def test_all_starts_nothing_beyond_its_budget(two_systems: Any, tmp_path: Path) -> None:
    found = run.reproduce_all(tmp_path, jobs=1, budget=20.0)
    assert read_results(tmp_path / "cheap.json")["rows"]
    assert not (tmp_path / "dear.json").exists() or not read_results(tmp_path / "dear.json")["rows"]
    assert found["not_started"] == 6


def test_a_system_whose_file_does_not_fit_is_named_and_the_others_run(two_systems: Any, tmp_path: Path) -> None:
    (tmp_path / "dear.json").write_text('{"schema": 99, "rows": []}')
    found = run.reproduce_all(tmp_path, jobs=1)
    assert [(failure["slug"], "schema 99" in failure["error"]) for failure in found["failed"]] == [("dear", True)]
    assert [system["slug"] for system in found["systems"]] == ["cheap"]


def test_a_failure_stores_what_ran_beside_it_and_is_raised(tmp_path: Path) -> None:
    arms = (Arm("ours", {"shift": -0.2, "seconds": 1.5}), Arm("baseline", {"shift": 0.0, "fails": True}))
    with pytest.raises(RuntimeError, match="as told"):
        run.reproduce(toy(arms=arms, measure=sleepy), tmp_path, seeds=1, jobs=2)
    assert keys(read_results(tmp_path / "toy.json")) == [("ours", None, 0)]


def test_a_worker_that_dies_is_named_and_leaves_the_others(tmp_path: Path) -> None:
    arms = (Arm("ours", {"shift": -0.2}), Arm("baseline", {"shift": 0.0, "dies": True}))
    experiment = toy(arms=arms, measure=sleepy)
    jobs = missing_jobs(ResultsFile(experiment, tmp_path), (0,))
    results = {job.arm.name: outcome for job, outcome, _ in run_jobs(Queue(jobs), 2)}
    assert "exit code 9" in str(results["baseline"])
    assert not isinstance(results["ours"], Exception)


SCRIPT = """
import sys, types
from pathlib import Path
from moesaic import catalog
from moesaic.cli.main import main
from moesaic.experiments import Arm
from tests.experiments.toy import sleepy, toy

if __name__ == "__main__":
    arms = (Arm("ours", {"shift": -0.2, "seconds": 0.0}), Arm("baseline", {"shift": 0.0, "seconds": 60.0}))
    module = types.SimpleNamespace(EXPERIMENT=toy(arms=arms, measure=sleepy))
    sys.argv[0] = "moesaic"
    catalog.METHODS = (catalog.Method("toy", "t", None, "routing", "t", ("routing:TopKRouter",), "toy_module"),)
    sys.modules["toy_module"] = module
    main()
"""


@pytest.mark.parametrize("arguments", [["toy", "--jobs", "1"], ["toy", "--jobs", "2"], ["--all", "--jobs", "2"]])
def test_ctrl_c_ends_everything_at_once_in_one_line_and_keeps_the_rows(tmp_path: Path, arguments: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), "reproduce", *arguments, "--results", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        start_new_session=True,  # its own group, as a terminal has, to send the signal to all of it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for _ in range(600):
        if (tmp_path / "toy.json").exists():
            break
        time.sleep(0.1)
    stored = len(read_results(tmp_path / "toy.json")["rows"])
    assert stored >= 1
    time.sleep(0.5)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert time.monotonic() - started < 20  # the measurement in progress would take 60
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("moesaic: interrupted") and "the same command goes on from there" in last
    assert len(read_results(tmp_path / "toy.json")["rows"]) >= stored
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
    for _ in range(100):  # Python's own helper of the pool leaves a moment later
        if not _alive_in_group(process.pid):
            break
        time.sleep(0.1)
    assert not _alive_in_group(process.pid)


def _alive_in_group(group: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("slug", ["star-routing", "dtop-p"])
def test_a_full_run_of_a_system_is_expected_to_fit_in_20_minutes_on_two_cores(slug: str, tmp_path: Path) -> None:
    experiment = run.load_experiment(slug)
    rows = ResultsFile(experiment, ROOT / "results").rows
    for known in (rows, []):  # from the stored rows, and as declared
        jobs = [
            Job(experiment, arm, seed, dataset, expected_seconds(experiment, arm, dataset, known))
            for arm in experiment.arms
            for seed in experiment.seeds
            for dataset in experiment.axis
        ]
        assert wall_seconds(jobs, 2) < 20 * 60
    assert json.dumps(run.plan(run.wanted_jobs(experiment, tmp_path), 2))
    assert experiment.sizes
