"""Pseudo-anomalies: counts, each generator's property, determinism."""

import numpy as np
import pytest

from moesaic.tabular import PseudoAnomalySampler
from moesaic.tabular.anomalies import _pairs_across_clusters

ALL = PseudoAnomalySampler().strategies


@pytest.mark.spec("ofa-tad", "6.9")
@pytest.mark.parametrize("n", [1, 4, 5, 97])
def test_count_is_exact(rng, n):
    points = PseudoAnomalySampler().sample(rng.normal(size=(80, 3)), n, rng)
    assert points.shape == (n, 3)
    assert np.isfinite(points).all()


@pytest.mark.spec("ofa-tad", "6.9")
def test_same_seed_same_points(rng):
    rows = rng.normal(size=(80, 3))
    one, two, other = (PseudoAnomalySampler().sample(rows, 40, np.random.default_rng(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)


@pytest.mark.spec("ofa-tad", "6.9")
def test_extrapolated_points_lie_beyond_a_pair(rng):
    rows = np.array([[0.0, 0.0], [1.0, 2.0]])
    points = PseudoAnomalySampler(["extrapolation"]).sample(rows, 200, rng)
    # From (0, 0) over (1, 2) by a in [1, 2): x = (1 + a)(1, 2), or backwards x = -a (1, 2).
    t = points[:, 0]
    np.testing.assert_allclose(points[:, 1], 2 * t)
    forward = t > 0
    assert ((t[forward] >= 2) & (t[forward] < 3)).all()
    assert ((t[~forward] <= -1) & (t[~forward] > -2)).all()
    assert 0 < forward.sum() < 200


@pytest.mark.spec("ofa-tad", "6.9")
def test_masking_zeroes_entries_at_its_rate(rng):
    rows = rng.normal(size=(50, 20)) + 10
    points = PseudoAnomalySampler(["masking"], mask_prob=0.3).sample(rows, 2000, rng)
    zero = points == 0
    assert abs(zero.mean() - 0.3) < 0.02
    assert np.isin(points[~zero], rows).all()


def test_uniform_and_gaussian_noise(rng):
    rows = np.concatenate([rng.normal(size=(100, 2)) * [1, 5], np.full((100, 1), 3.0)], axis=1)
    box = PseudoAnomalySampler(["uniform"]).sample(rows, 500, rng)
    assert (box >= rows.min(0)).all()
    assert (box <= rows.max(0)).all()
    cloud = PseudoAnomalySampler(["gaussian"], gaussian_alpha=2).sample(rows, 20000, rng)
    np.testing.assert_allclose(cloud.mean(0), rows.mean(0), atol=0.3)
    np.testing.assert_allclose(cloud.std(0), [2 * rows[:, 0].std(), 2 * rows[:, 1].std(), 2.0], rtol=0.05)


def test_interpolation_crosses_clusters(rng):
    centres = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]])
    rows = np.repeat(centres, 30, axis=0) + rng.normal(size=(90, 2))
    a, b = _pairs_across_clusters(rows, 500, rng)
    # 90 rows give 4 clusters for 3 blobs: one blob is split, so nearly all pairs lie far apart.
    assert (a != b).all()
    assert (np.linalg.norm(rows[a] - rows[b], axis=1) > 50).mean() > 0.6
    few = PseudoAnomalySampler(["interpolation"]).sample(rows[:40], 100, rng)
    assert (few.min(0) >= rows[:40].min(0)).all()
    same = PseudoAnomalySampler(["interpolation"]).sample(np.ones((100, 2)), 10, rng)
    np.testing.assert_array_equal(same, 1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rng: PseudoAnomalySampler(["typos"]), "strategies"),
        (lambda rng: PseudoAnomalySampler([]), "strategies"),
        (lambda rng: PseudoAnomalySampler(mask_prob=1.5), "mask_prob"),
        (lambda rng: PseudoAnomalySampler(gaussian_alpha=-1), "gaussian_alpha"),
        (lambda rng: PseudoAnomalySampler().sample([[1.0]], 3, rng), "t >= 2"),
        (lambda rng: PseudoAnomalySampler().sample([[1.0], [2.0]], 0, rng), "n is 0"),
    ],
)
def test_bad_input(rng, call, words):
    with pytest.raises(ValueError, match=words):
        call(rng)
