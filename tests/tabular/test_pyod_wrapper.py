"""PyOD's contract and signs."""

import numpy as np
import pytest

from .conftest import blobs

pytest.importorskip("pyod")

from moesaic.tabular import OneForAllDetector
from moesaic.tabular.pyod_wrapper import PyODOneForAll


def test_signs_are_pyods(network, rng):
    normal, far = blobs(rng), blobs(rng, 5) + 40
    detector = PyODOneForAll(network, contamination=0.1).fit(normal)
    assert detector.predict(far).tolist() == [1] * 5
    assert (detector.decision_function(far) > detector.threshold_).all()
    assert detector.labels_.mean() == pytest.approx(0.1, abs=0.02)
    assert ((detector.decision_scores_ > detector.threshold_) == detector.labels_.astype(bool)).all()
    assert detector.predict_proba(far)[:, 1].min() > 0.9


def test_scores_are_the_detectors(network, rng):
    normal, new = blobs(rng), blobs(rng, 9)
    ours = OneForAllDetector(network).fit(normal)
    theirs = PyODOneForAll(network).fit(normal)
    np.testing.assert_array_equal(theirs.decision_function(new), -ours.score_samples(new))
    np.testing.assert_array_equal(theirs.decision_scores_, ours.decision_scores_)


def test_parameters_are_pyods(network):
    assert set(PyODOneForAll(network).get_params(deep=False)) == {"model", "contamination", "n_neighbors"}
    with pytest.raises(ValueError, match="contamination"):
        PyODOneForAll(network, contamination=0.9)
