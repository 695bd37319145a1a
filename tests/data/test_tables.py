"""Labelled tables and the one-class split."""

import os

import numpy as np
import pytest
from scipy.io import savemat

from moesaic.data.tables import Table, load_table, one_class_split, read_table, table_names


def toy(normal=10, anomalous=3):
    labels = np.array([0, 1] * anomalous + [0] * (normal - anomalous))
    return Table("toy", np.arange(2.0 * len(labels)).reshape(-1, 2), labels)


@pytest.mark.case("C25")
@pytest.mark.parametrize("shuffle", [False, True])
def test_split_takes_normal_rows_once_and_leaves_none_out(shuffle):
    table = toy(11, 3)
    split = one_class_split(table, shuffle=shuffle, seed=3)
    assert (table.labels[split.context_ids] == 0).all()
    assert sorted([*split.context_ids, *split.test_ids]) == list(range(14))
    assert len(split.context) == 5
    assert split.test_labels.sum() == 3
    np.testing.assert_array_equal(split.test, table.rows[split.test_ids])
    np.testing.assert_array_equal(split.context, table.rows[split.context_ids])


def test_split_follows_the_file_unless_shuffled():
    plain = one_class_split(toy())
    assert (np.diff(plain.context_ids) > 0).all()
    one, two, other = (one_class_split(toy(), shuffle=True, seed=seed).context_ids for seed in (1, 1, 2))
    assert one.tolist() == two.tolist() != other.tolist()


@pytest.mark.parametrize("table", [toy(3, 1), Table("flat", np.ones((9, 1)), np.zeros(9, dtype=np.int64))])
def test_split_needs_both_kinds(table):
    with pytest.raises(ValueError, match="needs 4 and 1"):
        one_class_split(table)


def test_files_of_both_kinds(tmp_path):
    rows, labels = np.arange(6, dtype=np.uint8).reshape(3, 2), np.array([0, 1, 0], dtype=np.uint8)
    np.savez(tmp_path / "a.npz", X=rows, y=labels)
    savemat(tmp_path / "b.mat", {"X": rows, "y": labels[:, None]})
    for path in (tmp_path / "a.npz", tmp_path / "b.mat"):
        table = read_table(path)
        assert table.rows.dtype == np.float64
        assert table.labels.dtype == np.int64
        assert table.labels.tolist() == [0, 1, 0]
        assert table.name == path.stem


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": np.eye(2)}, "arrays X and y"),
        ({"X": np.eye(2), "y": np.zeros(3)}, "shape"),
        ({"X": np.ones(2), "y": np.zeros(2)}, "shape"),
        ({"X": np.eye(2), "y": np.array([1, 2])}, "0 .normal. and 1"),
    ],
)
def test_other_contents_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        read_table(tmp_path / "a.npz")


def test_pickles_and_other_suffixes_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_table(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="suffix"):
        read_table(tmp_path / "a.csv")


def test_unknown_table():
    assert {"wine", "satimage-2", "comm.and.crime", "arrhythmia"} <= set(table_names())
    with pytest.raises(ValueError, match=r"'wines'.*wine"):
        load_table("wines")


@pytest.mark.skipif(not os.environ.get("MOESAIC_DATA"), reason="MOESAIC_DATA names no mirror")
@pytest.mark.parametrize("name", table_names())
def test_every_table_of_the_mirror(name):
    table = load_table(name)
    split = one_class_split(table)
    assert np.isfinite(table.rows).all()
    assert len(split.context) == (table.labels == 0).sum() // 2
