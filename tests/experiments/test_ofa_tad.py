"""The experiment of OFA-TAD on made-up tables; its page shows what is stored."""

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.data.tables import Table
from moesaic.experiments import ofa_tad
from moesaic.experiments.ofa_tad import CLASSIC, EXPERIMENT, LUNAR, OURS, PYOD, measure, per_table_markdown

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"sources": ["a", "b"], "targets": ["c", "d"], "ranks": 8, "dim": 4, "hidden": 4, "epochs": 2}


def made_up(name: str) -> Table:
    """Sixty normal rows around a point, twelve anomalies on a shell around them."""
    rng = np.random.default_rng(ord(name))
    normal, shell = rng.normal(size=(60, 3)), rng.normal(size=(12, 3))
    rows = np.concatenate([normal, 8 * shell / np.linalg.norm(shell, axis=1, keepdims=True)])
    return Table(name, rows * [1, 10, 100], np.repeat([0, 1], [60, 12]))


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    monkeypatch.setattr(ofa_tad, "load_table", made_up)


ARMS = [pytest.param(arm, marks=pytest.mark.slow if arm.name == LUNAR else (), id=arm.name) for arm in EXPERIMENT.arms]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_measures_what_is_declared(arm):
    if arm.name in PYOD:
        pytest.importorskip("pyod")
    settings = {**EXPERIMENT.settings_of(arm), **SMALL}
    outcome = measure(settings, 1)
    EXPERIMENT.check_outcome(arm, 1, outcome)
    assert {len(curve) for curve in outcome.curves.values()} == {2}
    assert outcome.metrics["auroc"] == pytest.approx(np.mean(outcome.curves["auroc"]))
    if arm.name in CLASSIC:
        assert outcome.metrics["auroc"] > 0.95


def test_a_quick_run_keeps_both_kinds_of_rows():
    split = ofa_tad._split("c", 10)
    assert len(split.context) == 10
    assert split.test_labels.tolist() == [0] * 10 + [1] * 10
    np.testing.assert_array_equal(split.test, made_up("c").rows[split.test_ids])


def test_parts_that_draw_repeat_with_the_seed():
    settings = {**EXPERIMENT.settings, **SMALL}
    assert measure(settings, 1).metrics == measure(settings, 1).metrics != measure(settings, 2).metrics


def test_sources_are_no_targets():
    from moesaic.tabular.training import SOURCE_TABLES

    assert set(EXPERIMENT.settings["sources"]) == set(SOURCE_TABLES)
    assert not set(EXPERIMENT.settings["sources"]) & set(EXPERIMENT.settings["targets"])


def test_page_shows_the_stored_tables():
    document = json.loads((ROOT / "results" / "ofa-tad.json").read_text())
    page = (ROOT / "docs" / "methods" / "ofa-tad.md").read_text()
    shown = page.split("<!-- tables:ofa-tad -->\n")[1].split("<!-- end of tables -->")[0].strip()
    assert shown == per_table_markdown(document, [OURS, *CLASSIC, *PYOD]).strip()
    assert len(shown.splitlines()) == 2 + 23
