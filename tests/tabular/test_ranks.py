"""The rank map against its definition."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import QuantileTransformer

from moesaic.tabular.ranks import RankMap


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30))
@settings(max_examples=60, deadline=None)
def test_small_samples_get_mid_ranks(sample):
    values = np.array(sample, dtype=float)
    ordered = np.sort(values)
    expected = (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, side="right") - 1) / 2
    expected = expected / (len(values) - 1)
    expected[values == ordered[-1]] = 1
    expected[values == ordered[0]] = 0
    np.testing.assert_allclose(RankMap().fit(values).transform(values), expected, atol=1e-12)


def test_large_samples_agree_with_scikit_learn(rng):
    sample, values = rng.normal(size=20_000), rng.normal(size=(300, 2)) * 2
    theirs = QuantileTransformer(n_quantiles=1000, subsample=None).fit(sample[:, None])
    ours = RankMap().fit(sample).transform(values)
    np.testing.assert_allclose(ours, theirs.transform(values.reshape(-1, 1)).reshape(300, 2), atol=2e-3)


def test_ties_survive_rescaling(rng):
    sample = rng.integers(5, size=3000).astype(float)
    moved = sample / 3 + 0.7
    np.testing.assert_array_equal(RankMap().fit(sample).transform(sample), RankMap().fit(moved).transform(moved))
