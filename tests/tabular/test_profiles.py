"""Neighbour-distance profiles: the hand example, invariances, self-exclusion, odd tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moesaic.tabular import MultiViewDistanceEncoder
from moesaic.tabular.neighbours import make_index
from moesaic.tabular.views import VIEWS


def _exactly(values, expected):
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.spec("ofa-tad", "6.5")
def test_hand_example():
    context = np.array([[0.0], [1.0], [3.0]])
    encoder = MultiViewDistanceEncoder(("raw",), k=2)
    profile = encoder.fit_context(context)
    distances = encoder.indexes_[0].query(context / 4, 3)[0][:, 1:] * 4  # the raw view divides by a power of two
    _exactly(distances, [[1, 3], [1, 2], [2, 3]])
    # The distribution function of {1, 1, 2, 2, 3, 3} with ties at the middle of their interval, ends at 0 and 1.
    _exactly(profile[:, 0], [[0, 1], [0, 0.5], [0.5, 1]])
    _exactly(encoder.transform([[10.0]])[0, 0], [1, 1])
    _exactly(encoder.transform([[1.0]])[0, 0], [0, 0])


@pytest.mark.spec("ofa-tad", "6.1")
def test_order_of_rows_and_columns_does_not_matter(rng):
    context, query = rng.normal(size=(60, 4)), rng.normal(size=(9, 4))
    columns = rng.permutation(4)
    one = MultiViewDistanceEncoder(k=10).fit(context).transform(query)
    other = MultiViewDistanceEncoder(k=10).fit(context[rng.permutation(60)][:, columns]).transform(query[:, columns])
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.spec("ofa-tad", "6.2")
def test_affine_columns_and_common_scale(rng):
    context, query = rng.normal(size=(60, 4)), rng.normal(size=(9, 4))
    a, b = rng.uniform(0.1, 9, 4), rng.normal(size=4) * 5
    views = ("std", "minmax", "quantile")
    plain = MultiViewDistanceEncoder(views, 10).fit(context).transform(query)
    moved = MultiViewDistanceEncoder(views, 10).fit(context * a + b).transform(query * a + b)
    np.testing.assert_allclose(plain, moved, rtol=1e-4, atol=1e-6)
    raw = MultiViewDistanceEncoder(("raw",), 10)
    np.testing.assert_allclose(
        raw.fit(context).transform(query), raw.fit(context * 3.7e9).transform(query * 3.7e9), rtol=1e-4, atol=1e-6
    )


@pytest.mark.spec("ofa-tad", "6.3")
@given(
    arrays(np.float64, (13, 2), elements=st.floats(-1e12, 1e12)),
    arrays(np.float64, (4, 2), elements=st.floats(-1e300, 1e300)),
)
@settings(max_examples=40, deadline=None)
def test_profiles_ascend_within_0_and_1(context, query):
    encoder = MultiViewDistanceEncoder(k=6)
    for profile in (encoder.fit_context(context), encoder.transform(query)):
        assert np.isfinite(profile).all()
        assert profile.min() >= 0
        assert profile.max() <= 1
        assert (np.diff(profile, axis=2) >= -1e-6).all()


@pytest.mark.spec("ofa-tad", "6.4")
@pytest.mark.parametrize("view", VIEWS)
def test_context_rows_are_compared_with_the_others(rng, view):
    context = rng.normal(size=(30, 3))
    encoder = MultiViewDistanceEncoder((view,), k=5).fit(context)
    rows = encoder.to_views(context)[0]
    for i in (0, 11, 29):
        without = make_index("sklearn").fit(np.delete(rows, i, axis=0))
        expected = encoder.scales_[0].transform(without.query(rows[i : i + 1], 5)[0])[0]
        np.testing.assert_allclose(encoder.context_profile()[i, 0], expected, atol=1e-6)


@pytest.mark.spec("ofa-tad", "6.6")
def test_distance_scale_is_uniform_on_the_context(rng):
    profile = MultiViewDistanceEncoder().fit_context(rng.normal(size=(500, 3)))
    np.testing.assert_allclose(profile.mean((0, 2)), 0.5, atol=0.02)


def test_fit_context_and_context_profile_agree(rng):
    encoder = MultiViewDistanceEncoder(k=7)
    once = encoder.fit_context(rng.normal(size=(40, 3)))
    np.testing.assert_allclose(once, encoder.context_profile(), atol=1e-6)


@pytest.mark.spec("ofa-tad", "6.10")
def test_short_contexts_shorten_the_profile():
    assert MultiViewDistanceEncoder().fit_context([[0.0], [1.0], [5.0]]).shape == (3, 4, 2)
    assert MultiViewDistanceEncoder().fit([[0.0], [1.0]]).transform([[9.0]]).shape == (1, 4, 1)


def test_duplicates_and_constant_columns_stay_finite():
    context = np.ones((10, 2))
    encoder = MultiViewDistanceEncoder(k=4)
    assert (encoder.fit_context(context) == 0).all()
    far = encoder.transform([[1.0, 1.0], [2.0, 1.0]])
    assert (far[0] == 0).all()
    assert (far[1, :3] == 1).all()


def test_huge_and_tiny_values(rng):
    for scale in (1e300, 1e-300, 1.7e308 / 8):
        context = rng.uniform(-1, 1, size=(30, 2))
        small = MultiViewDistanceEncoder(k=5).fit(context).transform([[0.5, 0.5], [4.0, 4.0]])
        scaled = MultiViewDistanceEncoder(k=5).fit(context * scale).transform([[0.5 * scale] * 2, [4.0 * scale] * 2])
        np.testing.assert_allclose(scaled, small, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "faiss"])
@pytest.mark.parametrize("width", [3, 20])
def test_backends_agree(rng, backend, width):
    if backend == "faiss":
        pytest.importorskip("faiss")
    context, query = rng.normal(size=(200, width)) + 100, rng.normal(size=(50, width)) + 100
    ours = MultiViewDistanceEncoder(k=9).fit(context).transform(query)
    other = MultiViewDistanceEncoder(k=9, backend=backend).fit(context).transform(query)
    np.testing.assert_allclose(ours, other, atol=1e-5)


def test_rounding_does_not_split_equal_distances(rng):
    context = rng.integers(3, size=(80, 4)).astype(float)  # few different distances, each many times
    query = rng.integers(4, size=(20, 4)).astype(float)
    plain = MultiViewDistanceEncoder(k=10).fit(context).transform(query)
    moved = MultiViewDistanceEncoder(k=10).fit(context / 3 + 7.1).transform(query / 3 + 7.1)
    np.testing.assert_allclose(plain[:, 1:], moved[:, 1:], atol=1e-6)


@pytest.mark.parametrize("width", [2, 40])
def test_chunks_of_queries_change_nothing(rng, width, monkeypatch):
    rows, query = rng.normal(size=(100, width)), rng.normal(size=(53, width))
    whole = make_index("sklearn").fit(rows).query(query, 8)
    monkeypatch.setattr("moesaic.tabular.neighbours._CHUNK_FLOATS", 8 * width * 7)
    pieces = make_index("sklearn").fit(rows).query(query, 8)
    np.testing.assert_array_equal(whole[1], pieces[1])
    np.testing.assert_allclose(whole[0], pieces[0], rtol=1e-12)


def test_equal_rows_far_from_zero_have_distance_zero(rng):
    rows = rng.normal(size=(50, 20)) * 1e-3 + 1e6
    distance, ids = make_index("sklearn").fit(rows).query(rows, 2)
    assert (distance[:, 0] == 0).all()
    np.testing.assert_array_equal(ids[:, 0], np.arange(50))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultiViewDistanceEncoder(views=("raw", "l2")), "views"),
        (lambda: MultiViewDistanceEncoder(views=()), "views"),
        (lambda: MultiViewDistanceEncoder(k=0), "k must be at least 1, got 0"),
        (lambda: MultiViewDistanceEncoder(backend="annoy"), "backend"),
        (lambda: MultiViewDistanceEncoder().fit([[1.0]]), "at least 2"),
        (lambda: MultiViewDistanceEncoder().fit([[1.0], [np.nan]]), "finite"),
        (lambda: MultiViewDistanceEncoder().fit([1.0, 2.0]), "shape"),
        (lambda: MultiViewDistanceEncoder().fit([[1.0], [2.0]]).transform([[1.0, 2.0]]), "2 columns"),
        (lambda: MultiViewDistanceEncoder().fit([[1.0], [2.0]]).transform([[np.inf]]), "finite"),
        (lambda: MultiViewDistanceEncoder().transform([[1.0]]), "no context"),
        (lambda: make_index("sklearn").fit(np.ones((3, 1))).query(np.ones((1, 1)), 4), "1..3"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
