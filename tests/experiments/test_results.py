"""What is committed in results/ is what its own rows say, and the pages show it."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from moesaic.catalog import METHODS, find
from moesaic.experiments.base import summarise
from moesaic.experiments.plots import CSS_PER_INCH, DEVICE_PIXELS, NARROW, PAGES, WIDE, draw, rows_digest
from moesaic.experiments.run import load_experiment
from moesaic.experiments.store import read_results, row_of, verdict
from moesaic.experiments.tables import fill_blocks

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ARXIV = re.compile(r"^\d{4}\.\d{5}$")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_means_and_verdict_follow_from_the_rows(path: Path) -> None:
    document = read_results(path)
    rows = [row_of(stored) for stored in document["rows"]]
    experiment = load_experiment(document["slug"]).at(document.get("size"))
    if experiment.datasets:
        assert document["summary"] == summarise(rows, experiment.datasets)
    for arm, entry in () if experiment.datasets else document["summary"].items():
        for metric, summary in entry.items():
            values = [row.metrics[metric] for row in rows if row.arm == arm]
            mean = sum(values) / len(values)
            assert summary["mean"] == pytest.approx(mean, rel=1e-12, abs=1e-15)
            variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
            assert summary["std"] == pytest.approx(variance**0.5, rel=1e-6, abs=1e-12)
            assert summary["seeds"] == len(values)
    assert {row.arm for row in rows} == set(document["summary"])
    again = json.loads(json.dumps(verdict(experiment, rows)))
    for found, stored in zip(again, document["verdict"], strict=True):
        assert found["status"] == stored["status"], found["name"]
        assert found["reason"] == stored["reason"], found["name"]
        for key in ("value", "standard_error"):
            assert found[key] == pytest.approx(stored[key], rel=1e-9, abs=1e-12), (found["name"], key)
        assert (found["threshold"], found["comparison"]) == (stored["threshold"], stored["comparison"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_are_of_the_experiment_as_it_stands_and_complete(path: Path) -> None:
    document = read_results(path)
    experiment = load_experiment(document["slug"]).at(document.get("size"))
    assert path.stem == experiment.name
    have = {(row["arm"], row.get("dataset"), row["seed"]): row for row in document["rows"]}
    assert len(have) == len(document["rows"])
    for arm in experiment.arms:
        for dataset in experiment.axis:
            for seed in experiment.seeds:
                row = have[arm.name, dataset, seed]
                assert row["fingerprint"] == experiment.fingerprint(arm, dataset), (arm.name, seed)
    for row in document["rows"]:
        assert row["command"].startswith("moesaic reproduce")
        assert row["seconds"] >= 0
        assert row["versions"]["torch"]
        assert row["cpu"]


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.stem)
def test_result_blocks_of_pages_equal_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "<!-- results:" not in text.replace("`<!-- results:", ""):
        return
    documents = {path.stem: read_results(path) for path in FILES}
    assert "not measured" not in text
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_pictures_were_drawn_from_the_stored_rows(path: Path) -> None:
    rows = [row_of(stored) for stored in read_results(path)["rows"]]
    for page in PAGES:
        with Image.open(path.with_name(f"{path.stem}{page.suffix}.png")) as picture:
            assert picture.text["Rows"] == rows_digest(rows), f"run: moesaic methods --fill docs/methods/{path.stem}.md"
            assert picture.width == page.width * DEVICE_PIXELS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("page", "column"), [(WIDE, 688), (WIDE, 736), (NARROW, 358), (NARROW, 288)])
def test_text_of_pictures_can_be_read_at_the_width_of_the_page(path: Path, page, column, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A phone of 390 pixels has a column of 358, one of 320 has 288; 9 CSS pixels are the least that can be read."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), Path(a[0]).touch()))
    document = read_results(path)
    rows = [row_of(stored) for stored in document["rows"]]
    draw(load_experiment(document["slug"]).at(document.get("size")), rows, tmp_path)
    figure = drawn[PAGES.index(page)]
    figure.draw_without_rendering()
    shown = column / page.width  # the picture is scaled to the column
    beyond = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in _beyond(axis)]
    hidden = {label for tick in beyond for label in (tick.label1, tick.label2)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in hidden]
    assert len(texts) > 20
    for text in texts:
        assert text.get_fontsize() / 72 * CSS_PER_INCH * shown >= 9, text
        extent = text.get_window_extent()
        assert figure.bbox.x0 - 1 <= extent.x0 and extent.x1 <= figure.bbox.x1 + 1, text


def _beyond(axis):  # type: ignore[no-untyped-def]
    """Ticks outside the limits, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
