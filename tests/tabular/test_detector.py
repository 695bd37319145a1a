"""The estimator: scikit-learn's contract, tables as people have them, signs, explanations."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from moesaic.tabular import OneForAllDetector

from .conftest import SMALL, blobs


@pytest.fixture
def detector(network):
    return OneForAllDetector(network)


@pytest.mark.parametrize("novelty", [True, False])
def test_scikit_learn_contract(novelty):
    results = check_estimator(OneForAllDetector(novelty=novelty), on_fail=None)
    assert len(results) > 40
    assert [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"] == []


def test_works_at_once_with_the_shipped_network(rng):
    normal = blobs(rng, 300, 6)
    scores = OneForAllDetector().fit(normal[:200]).score_samples(np.concatenate([normal[200:], normal[200:] + 20]))
    assert scores[100:].max() < scores[:100].mean()


def test_signs_and_attributes(detector, rng):
    normal = blobs(rng)
    detector.fit(normal)
    far = normal[:5] + 50
    assert (detector.predict(far) == -1).all()
    assert (detector.decision_function(far) < 0).all()
    assert (-detector.score_samples(far) > detector.threshold_).all()
    assert detector.offset_ == -detector.threshold_
    assert ((detector.decision_scores_ > detector.threshold_) == detector.labels_.astype(bool)).all()
    assert (detector.decision_scores_ > 0).all()
    assert (detector.decision_scores_ < 1).all()
    assert 0 < detector.labels_.mean() <= 0.05 + 1e-9


def test_rows_of_fit_are_not_compared_with_themselves(network, rng):
    normal = blobs(rng)
    detector = OneForAllDetector(network).fit(normal)
    np.testing.assert_allclose(-detector.score_samples(normal), detector.decision_scores_, atol=1e-9)
    papers = OneForAllDetector(network, leave_out_equal=False).fit(normal)
    assert (-papers.score_samples(normal) < papers.decision_scores_).mean() > 0.9
    new = blobs(rng, 20)
    np.testing.assert_allclose(papers.score_samples(new), detector.score_samples(new), atol=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_contamination_is_the_flagged_share(network, rng, share):
    detector = OneForAllDetector(network, contamination=share, novelty=False)
    flagged = detector.fit_predict(blobs(rng, 200)) == -1
    assert flagged.mean() == pytest.approx(share, abs=0.02)


def test_novelty_shows_the_methods_that_make_sense(network, rng):
    new, old = OneForAllDetector(network), OneForAllDetector(network, novelty=False)
    assert hasattr(new, "predict")
    assert not hasattr(new, "fit_predict")
    assert hasattr(old, "fit_predict")
    assert not hasattr(old, "score_samples")
    with pytest.raises(NotFittedError):
        new.predict(blobs(rng))


def test_fit_does_not_train_and_clone_keeps_the_network(network, rng):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    detector = clone(OneForAllDetector(network)).fit(blobs(rng))
    for name, value in detector.model.state_dict().items():
        assert (value == before[name]).all()


def test_pickle_and_pipeline(network, rng):
    normal, new = blobs(rng), blobs(rng, 20)
    pipeline = make_pipeline(StandardScaler(), OneForAllDetector(network)).fit(normal)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(pipeline)).score_samples(new), pipeline.score_samples(new))


@pytest.mark.case("C25")
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_rows_score_does_not_depend_on_the_batch(detector, rng, batch, monkeypatch):
    detector.fit(blobs(rng))
    new = blobs(rng, 130)
    whole = detector.score_samples(new)
    parts = [detector.score_samples(new[start : start + batch]) for start in range(0, 130, batch)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-9)
    monkeypatch.setattr("moesaic.tabular.detector._BATCH_ROWS", batch)
    np.testing.assert_allclose(detector.score_samples(new), whole, atol=1e-9)


def test_pretrain_replaces_the_network(rng):
    frame = pd.DataFrame({"a": rng.normal(size=40), "kind": rng.choice(["x", "y"], 40)})
    detector = OneForAllDetector().pretrain([frame, blobs(rng, 30)], config=SMALL, epochs=2)
    assert detector.model.config == SMALL
    assert clone(detector).fit(frame).predict(frame.head(3)).shape == (3,)


def test_save_model_round_trip(detector, rng, tmp_path):
    path = tmp_path / "net.safetensors"
    detector.save_model(path)
    normal, new = blobs(rng), blobs(rng, 9)
    again = OneForAllDetector(path).fit(normal).score_samples(new)
    np.testing.assert_array_equal(again, detector.fit(normal).score_samples(new))


def test_tables_as_people_have_them(detector, rng):
    rows = 80
    frame = pd.DataFrame(
        {
            "amount": rng.normal(100, 10, rows),
            "count": pd.array(rng.integers(0, 5, rows), dtype="Int64"),
            "kind": rng.choice(["card", "cash"], rows),
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 90, rows), unit="D"),
            "paid": rng.random(rows) < 0.9,
            "nothing": np.nan,
            "same": 3.0,
        }
    )
    frame.loc[3, "amount"] = np.nan
    frame.loc[4, "count"] = pd.NA
    frame.loc[5, "kind"] = None
    detector.fit(frame)
    new = frame.head(4).copy()
    new.loc[0, "amount"] = 900.0
    new.loc[1, "when"] = pd.Timestamp("2031-01-01")
    new.loc[2, "kind"] = "cheque"
    assert np.isfinite(detector.score_samples(new)).all()
    top = [detector.explain(new).top_columns(row, 1)[0][0] for row in range(2)]
    assert top == ["amount", "when"]
    np.testing.assert_array_equal(detector.score_samples(new), detector.score_samples(new.iloc[:, :]))
    with pytest.raises(ValueError, match="feature names"):
        detector.score_samples(new.iloc[:, ::-1])


def test_missing_values_where_the_context_had_none(detector, rng):
    detector.fit(blobs(rng))
    with pytest.warns(UserWarning, match="x1"):
        assert np.isfinite(detector.score_samples([[0.0, np.nan, 0.0]])).all()


def test_missing_values_that_the_context_knows_are_no_surprise(detector, rng):
    normal = blobs(rng, 200)
    normal[::2, 1] = np.nan
    detector.fit(normal)
    assert detector.columns_.transform([[0.0, np.nan, 0.0]]).shape == (1, 4)
    assert (detector.predict(normal[:50]) == 1).mean() > 0.8


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[1.0, 2.0]], "minimum of 2"),
        ([[1.0], [np.inf]], "inf"),
        (pd.DataFrame({"a": [1.0]}), "at least 2 row"),
        (pd.DataFrame({"a": [1.0, np.inf, 2.0]}), "column 'a'"),
        (pd.DataFrame({"note": [f"text {i}" for i in range(30)]}), "column 'note' holds text with 30"),
        (pd.DataFrame(index=range(5)), "column"),
    ],
)
def test_tables_that_are_refused(detector, table, words):
    with pytest.raises(ValueError, match=words):
        detector.fit(table)


def test_text_where_numbers_were(detector):
    detector.fit(pd.DataFrame({"a": np.arange(30.0)}))
    with pytest.raises(ValueError, match="column 'a' held numbers"):
        detector.score_samples(pd.DataFrame({"a": ["many", "few"]}))


@pytest.mark.parametrize("rows", [2, 3, 21])
def test_fewer_rows_than_neighbours(detector, rng, rows):
    scores = detector.fit(rng.normal(size=(rows, 2))).score_samples(rng.normal(size=(4, 2)))
    assert np.isfinite(scores).all()


def test_huge_values(detector, rng):
    detector.fit(rng.normal(size=(50, 2)) * 1e300)
    scores = detector.score_samples([[0.0, 0.0], [1.7e308, -1.7e308]])
    assert scores[1] < scores[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contamination": 0.6}, "contamination"),
        ({"contamination": "most"}, "contamination"),
        ({"n_neighbors": 0}, "n_neighbors"),
        ({"n_neighbors": 21}, "reads at most 20"),
        ({"backend": "annoy"}, "backend"),
    ],
)
def test_bad_parameters(network, rng, changes, words):
    with pytest.raises(ValueError, match=words):
        OneForAllDetector(network, **changes).fit(blobs(rng))


def test_a_model_path_that_is_not_there(rng):
    with pytest.raises(FileNotFoundError, match="absent"):
        OneForAllDetector("absent.safetensors").fit(blobs(rng))


def test_explanation_names_the_column_that_was_changed(detector, rng):
    scales = np.array([1.0, 1000.0, 0.01, 5.0])
    normal = rng.normal(size=(300, 4)) * scales
    detector.fit(normal)
    odd = rng.normal(size=(4, 4)) * scales * 0.3
    odd[np.arange(4), np.arange(4)] = 9 * scales
    why = detector.explain(odd)
    assert [why.top_columns(row, 1)[0][0] for row in range(4)] == ["x0", "x1", "x2", "x3"]
    np.testing.assert_allclose(why.score, -detector.score_samples(odd), atol=1e-9)
    np.testing.assert_allclose(why.view_weights.sum(1), 1)
    np.testing.assert_allclose(why.columns.sum(1), 1)
    logit = np.log(why.view_scores / (1 - why.view_scores))
    np.testing.assert_allclose(1 / (1 + np.exp(-(why.view_weights * logit).sum(1))), why.score, atol=1e-6)


def test_explanation_of_an_ordinary_row_blames_nothing():
    normal = np.repeat(np.arange(10.0), 5)[:, None]
    why = OneForAllDetector().fit(normal).explain([[4.0]])
    assert why.columns.sum() == 0
    assert why.top_columns(0) == []


def test_explanation_as_frame_and_plot(detector, rng):
    why = detector.fit(blobs(rng)).explain(blobs(rng, 3) + 9)
    frame = why.to_frame()
    assert len(frame) == 3
    assert {"score", "weight:raw", "score:quantile", "column:x2"} <= set(frame)
    figure = why.plot(1)
    titles = [axes.get_title() for axes in figure.axes]
    assert f"{why.score[1]:.2f}" in titles[0]
