"""Metrics against their definitions, and evaluation that cannot flatter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.tabular import OneForAllDetector
from moesaic.tabular.metrics import auprc, auroc, f1_at_known_rate, f1_at_threshold

from .conftest import blobs


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=25))
def test_auroc_is_the_chance_to_rank_a_pair_right(pairs):
    labels, scores = np.array(pairs).T
    if set(labels) != {0, 1}:
        return
    high, low = scores[labels == 1][:, None], scores[labels == 0][None, :]
    assert auroc(labels, scores) == pytest.approx(((high > low) + 0.5 * (high == low)).mean())


def test_auprc_by_hand():
    # Ranked: anomaly, normal, anomaly, normal: precision 1 at recall 1/2, 2/3 at recall 1.
    assert auprc([1, 0, 1, 0], [4, 3, 2, 1]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


@pytest.mark.spec("ofa-tad", "6.11")
def test_f1_of_a_perfect_ranking_is_one():
    labels = np.array([0] * 17 + [1] * 3)
    assert f1_at_known_rate(labels, np.arange(20)) == 1.0
    assert f1_at_known_rate(labels, -np.arange(20)) == 0.0
    assert f1_at_threshold(labels, np.arange(20), 16.5) == 1.0
    assert f1_at_threshold(labels, np.arange(20), 99) == 0.0


@pytest.mark.case("C25")
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_metrics_are_the_same_for_any_batch_size(network, rng, batch):
    """Also where the last batch is not full: no row is dropped."""
    normal = blobs(rng, 200)
    test = np.concatenate([normal[100:], normal[100:130] + rng.normal(size=(30, 3)) * 6])
    labels = np.repeat([0, 1], [100, 30])
    detector = OneForAllDetector(network).fit(normal[:100])
    whole = -detector.score_samples(test)
    parts = np.concatenate([-detector.score_samples(test[i : i + batch]) for i in range(0, len(test), batch)])
    assert len(parts) == len(labels)
    for metric in (auroc, auprc, f1_at_known_rate):
        assert metric(labels, np.round(parts, 9)) == metric(labels, np.round(whole, 9))


@pytest.mark.case("C25")
def test_threshold_and_scale_never_see_the_rows_to_judge(network, rng):
    normal, new = blobs(rng, 100), blobs(rng, 30)
    detector = OneForAllDetector(network).fit(normal)
    before, alone = detector.threshold_, detector.score_samples(new)
    beside_outliers = detector.score_samples(np.concatenate([new, new * 1e6]))[:30]
    assert detector.threshold_ == before
    np.testing.assert_allclose(beside_outliers, alone, atol=1e-9)


@pytest.mark.parametrize(
    ("labels", "scores", "words"),
    [
        ([0, 0], [1.0, 2.0], "both 0"),
        ([0, 2], [1.0, 2.0], "both 0"),
        ([0, 1, 1], [1.0, 2.0], "shape"),
        ([0, 1], [1.0, np.nan], "finite"),
    ],
)
def test_bad_input(labels, scores, words):
    for metric in (auroc, auprc, f1_at_known_rate):
        with pytest.raises(ValueError, match=words):
            metric(labels, scores)
