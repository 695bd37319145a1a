import json
import math
from pathlib import Path

import pytest

from moesaic.experiments import Arm, Criterion, Metric, Outcome, run
from moesaic.experiments.store import ResultsFile, compact_json, read_results
from moesaic.experiments.tables import fill_blocks, results_markdown
from moesaic.experiments.verdict import judge
from tests.experiments import toy as toy_module
from tests.experiments.toy import toy


class Interrupted(Exception):
    pass


def test_rows_summary_and_verdict_are_stored(tmp_path: Path) -> None:
    document = run.reproduce(toy(), tmp_path, jobs=1, command="moesaic reproduce toy")
    assert document == json.loads((tmp_path / "toy.json").read_text())
    assert [(row["arm"], row["seed"]) for row in document["rows"]] == [
        (arm, seed) for arm in ("ours", "baseline") for seed in (0, 1, 2)
    ]
    losses = [row["metrics"]["loss"] for row in document["rows"] if row["arm"] == "ours"]
    assert document["summary"]["ours"]["loss"]["mean"] == pytest.approx(math.fsum(losses) / 3)
    assert document["verdict"][0]["status"] == "met"
    assert document["verdict"][0]["value"] == pytest.approx(-0.2)
    assert document["rows"][0]["curves"]["trace"][1] == pytest.approx(losses[0] / 2)
    assert document["versions"]["torch"]
    assert document["cpu"]
    assert document["command"] == "moesaic reproduce toy"
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.narrow.png", "toy.png"]


def test_workers_measure_the_same_as_this_process(tmp_path: Path) -> None:
    one = run.reproduce(toy(), tmp_path / "one", jobs=1)
    two = run.reproduce(toy(), tmp_path / "two", jobs=2)
    assert [row["metrics"] for row in one["rows"]] == [row["metrics"] for row in two["rows"]]


def test_each_measurement_is_stored_as_it_finishes_and_a_rerun_resumes(tmp_path: Path) -> None:
    calls: list[tuple[float, int]] = []

    def dying(settings, seed):  # type: ignore[no-untyped-def]
        calls.append((settings["shift"], seed))
        if len(calls) == 4:
            raise Interrupted
        return toy_module.measure(settings, seed)

    with pytest.raises(Interrupted):
        run.reproduce(toy(measure=dying), tmp_path, jobs=1)
    assert len(read_results(tmp_path / "toy.json")["rows"]) == 3
    document = run.reproduce(toy(measure=dying), tmp_path, jobs=1)
    assert len(document["rows"]) == 6
    assert len(calls) == 7
    assert len(set(calls)) == 6
    run.reproduce(toy(measure=dying), tmp_path, jobs=1)
    assert len(calls) == 7


def test_more_seeds_join_the_stored_ones(tmp_path: Path) -> None:
    run.reproduce(toy(), tmp_path, seeds=2, jobs=1)
    document = run.reproduce(toy(), tmp_path, seeds=5, jobs=1)
    assert sorted({row["seed"] for row in document["rows"]}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"base": 1.5, "noise": 0.01}}, r"base: 1\.0 -> 1\.5"),
        ({"version": 2}, "version 1 -> 2"),
        ({"arms": (Arm("ours", {"shift": -0.3}), Arm("baseline", {"shift": 0.0}))}, r"shift: -0\.2 -> -0\.3"),
    ],
)
def test_rows_of_another_configuration_are_refused(tmp_path: Path, changes, said) -> None:  # type: ignore[no-untyped-def]
    run.reproduce(toy(), tmp_path, jobs=1)
    before = (tmp_path / "toy.json").read_bytes()
    with pytest.raises(ValueError, match=said):
        run.reproduce(toy(**changes), tmp_path, jobs=1)
    assert (tmp_path / "toy.json").read_bytes() == before


def test_rows_of_an_arm_that_is_gone_are_refused(tmp_path: Path) -> None:
    run.reproduce(toy(), tmp_path, jobs=1)
    with pytest.raises(ValueError, match="no such arm"):
        run.reproduce(toy(arms=(Arm("ours", {"shift": -0.2}),), criteria=()), tmp_path, jobs=1)


def test_a_new_arm_joins_without_running_the_others_again(tmp_path: Path) -> None:
    run.reproduce(toy(), tmp_path, jobs=1)
    calls: list[float] = []

    def counted(settings, seed):  # type: ignore[no-untyped-def]
        calls.append(settings["shift"])
        return toy_module.measure(settings, seed)

    arms = (*toy().arms, Arm("third", {"shift": 0.1}))
    document = run.reproduce(toy(arms=arms, measure=counted), tmp_path, jobs=1)
    assert calls == [0.1] * 3
    assert set(document["summary"]) == {"ours", "baseline", "third"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99, "rows": []}'])
def test_files_that_are_no_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "toy.json").write_text(text)
    with pytest.raises(ValueError, match=r"toy\.json"):
        ResultsFile(toy(), tmp_path)


def test_a_quick_run_uses_the_quick_settings_and_writes_nothing(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    rows = run.quick(toy())
    assert [row.arm for row in rows] == ["ours", "baseline"]
    assert rows[1].metrics["loss"] == pytest.approx(2.0 - 0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome({"loss": float("nan")}), "metric loss of arm 'ours', seed 0 of toy is nan"),
        (Outcome({}), r"missing \['loss'\]"),
        (Outcome({"loss": 1.0, "extra": 1.0}), r"unknown \['extra'\]"),
    ],
)
def test_a_measurement_without_its_metrics_is_refused(tmp_path: Path, outcome, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        run.reproduce(toy(measure=lambda settings, seed: outcome), tmp_path, jobs=1)
    assert not (tmp_path / "toy.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ()},
        {"seeds": ()},
        {"metrics": ()},
        {"arms": (Arm("ours"), Arm("ours"))},
        {"criteria": (Criterion("c", "s", ("nobody",), lambda m: 0.0, "<", 0.0),)},
        {"quick_arms": ("nobody",)},
        {"settings": {"base": object()}},
    ],
)
def test_experiments_that_do_not_fit_together_are_refused(changes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="toy"):
        toy(**changes)


def test_unknown_arm_seeds_and_jobs_are_refused(tmp_path: Path) -> None:
    for arguments in ({"arms": ["nobody"]}, {"seeds": 0}, {"jobs": 0}):
        with pytest.raises(ValueError, match=r"nobody|seeds|jobs"):
            run.reproduce(toy(), tmp_path, **arguments)  # type: ignore[arg-type]


DIFFERENCE = Criterion("d", "a below b", ("a", "b"), lambda m: m["a"]["x"] - m["b"]["x"], "<", 0.0)


def paired(differences: list[float]) -> dict[int, dict[str, dict[str, float]]]:
    return {seed: {"a": {"x": seed + d}, "b": {"x": float(seed)}} for seed, d in enumerate(differences)}


def test_the_standard_error_is_that_of_paired_differences() -> None:
    differences = [-0.4, -0.1, -0.3, -0.2]
    found = judge(DIFFERENCE, paired(differences))
    mean = sum(differences) / 4
    std = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert found["value"] == pytest.approx(mean)
    assert found["standard_error"] == pytest.approx(std / math.sqrt(4))
    assert found["per_seed"]["1"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("differences", "status"),
    [
        ([-0.3, -0.31, -0.29], "met"),
        ([0.3, 0.31, 0.29], "not met"),
        ([-0.3, 0.31, -0.05], "inconclusive"),  # the spread swamps it
        ([-0.3], "not measured"),  # one seed proves nothing: its spread is not known
        ([0.0, 0.0], "not met"),  # equal is not below
    ],
)
def test_status(differences: list[float], status: str) -> None:
    assert judge(DIFFERENCE, paired(differences))["status"] == status


def test_a_deterministic_experiment_is_judged_on_one_row() -> None:
    assert judge(DIFFERENCE, paired([-0.3]), deterministic=True)["status"] == "met"


def test_seeds_without_all_arms_are_left_out_and_none_is_not_measured() -> None:
    rows = paired([-0.3, -0.31, -0.29])
    del rows[1]["b"]
    assert set(judge(DIFFERENCE, rows)["per_seed"]) == {"0", "2"}
    found = judge(DIFFERENCE, {0: {"a": {"x": 1.0}}})
    assert found["value"] is None
    assert (found["status"], found["reason"]) == ("not measured", "no rows of b")
    assert judge(DIFFERENCE, {})["reason"] == "no rows of a, b"
    halves = {0: {"a": {"x": 1.0}}, 1: {"b": {"x": 1.0}}}
    assert judge(DIFFERENCE, halves)["reason"] == "no seed has all of a, b"


def test_bad_criteria_and_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="comparison"):
        Criterion("c", "s", ("a",), lambda m: 0.0, "=", 0.0)
    with pytest.raises(ValueError, match="arms"):
        Criterion("c", "s", (), lambda m: 0.0, "<", 0.0)
    with pytest.raises(ValueError, match="better"):
        Metric("loss", "loss", "best")


def test_tables_and_blocks(tmp_path: Path) -> None:
    document = run.reproduce(toy(), tmp_path, jobs=1, command="moesaic reproduce toy")
    text = results_markdown(document)
    assert "| ours | 3 | 0.8" in text
    assert "**met**" in text
    assert "loss (nats) ↓" in text
    page = "# Toy\n<!-- results:toy -->\nold\n<!-- end of results -->\nend\n"
    filled = fill_blocks(page, {"toy": document})
    assert text in filled
    assert "old" not in filled
    assert filled.endswith("end\n")
    assert fill_blocks(filled, {"toy": document}) == filled
    with pytest.raises(ValueError, match="results of 'toy'"):
        fill_blocks(page, {})
    with pytest.raises(ValueError, match="no block"):
        fill_blocks("# Toy\n", {"toy": document})


def test_compact_json_is_json_with_lists_on_one_line() -> None:
    value = {"a": [1, 2.5, 'x"\\ü'], "b": {"c": [], "d": [[1, 2], [3]]}, "e": None, "f": "ü"}
    text = compact_json(value)
    assert json.loads(text) == value
    assert '[1, 2.5, "x' in text
    assert "\n   1" not in text
