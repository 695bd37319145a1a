"""What is committed in results/ is what its own rows say, and the pages show it."""

import json
import re
from pathlib import Path

import pytest

from moesaic.catalog import METHODS, find
from moesaic.experiments.run import load_experiment
from moesaic.experiments.store import read_results, row_of, verdict
from moesaic.experiments.tables import fill_blocks

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ARXIV = re.compile(r"^\d{4}\.\d{5}$")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_means_and_verdict_follow_from_the_rows(path: Path) -> None:
    document = read_results(path)
    rows = [row_of(stored) for stored in document["rows"]]
    for arm, entry in document["summary"].items():
        for metric, summary in entry.items():
            values = [row.metrics[metric] for row in rows if row.arm == arm]
            mean = sum(values) / len(values)
            assert summary["mean"] == pytest.approx(mean, rel=1e-12, abs=1e-15)
            variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
            assert summary["std"] == pytest.approx(variance**0.5, rel=1e-6, abs=1e-12)
            assert summary["seeds"] == len(values)
    assert {row.arm for row in rows} == set(document["summary"])
    experiment = load_experiment(path.stem)
    again = json.loads(json.dumps(verdict(experiment, rows)))
    for found, stored in zip(again, document["verdict"], strict=True):
        assert found["status"] == stored["status"], found["name"]
        for key in ("value", "standard_error"):
            assert found[key] == pytest.approx(stored[key], rel=1e-9, abs=1e-12), (found["name"], key)
        assert (found["threshold"], found["comparison"]) == (stored["threshold"], stored["comparison"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_are_of_the_experiment_as_it_stands_and_complete(path: Path) -> None:
    document, experiment = read_results(path), load_experiment(path.stem)
    assert document["slug"] == path.stem == experiment.slug
    have = {(row["arm"], row["seed"]): row for row in document["rows"]}
    assert len(have) == len(document["rows"])
    for arm in experiment.arms:
        for seed in experiment.seeds:
            assert have[arm.name, seed]["fingerprint"] == experiment.fingerprint(arm), (arm.name, seed)
    for row in document["rows"]:
        assert row["command"].startswith("moesaic reproduce")
        assert row["seconds"] >= 0
        assert row["versions"]["torch"]
        assert row["cpu"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_result_blocks_of_pages_equal_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "<!-- results:" not in text.replace("`<!-- results:", ""):
        return
    documents = {path.stem: read_results(path) for path in FILES}
    assert fill_blocks(text, documents) == text, f"run: moesaic methods --fill {page.relative_to(ROOT)}"


def test_the_catalogue_names_what_is_there() -> None:
    assert len(METHODS) == 38
    assert len({method.slug for method in METHODS}) == 38
    for method in METHODS:
        assert method.arxiv is None or ARXIV.match(method.arxiv), method.slug
        assert method.title
        assert method.summary
        for name in method.names:
            module, _, attribute = name.partition(":")
            assert hasattr(__import__(f"moesaic.{module}", fromlist=[attribute]), attribute), name
        if method.experiment is not None:
            assert load_experiment(method.slug).slug == method.slug
    assert {m.slug for m in METHODS if m.status == "ready"} >= {"star-routing", "dtop-p"}
    with pytest.raises(ValueError, match="slug must be one of"):
        find("nothing")


@pytest.mark.parametrize("slug", ["star-routing", "dtop-p"])
def test_a_complete_system_has_results_and_a_page(slug: str) -> None:
    assert (ROOT / "results" / f"{slug}.json").exists()
    assert (ROOT / "results" / f"{slug}.png").read_bytes().startswith(b"\x89PNG")
    assert f"<!-- results:{slug} -->" in (ROOT / "docs" / "methods" / f"{slug}.md").read_text(encoding="utf-8")


def test_planned_systems_are_refused_with_what_to_do() -> None:
    planned = next(method for method in METHODS if method.experiment is None)
    with pytest.raises(ValueError, match="no experiment yet"):
        load_experiment(planned.slug)
