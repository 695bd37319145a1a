"""Reading text: formats, splits, refusals."""

from __future__ import annotations

import json
import sys

import pytest

from moesaic.data.text import Documents, read_documents


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffZürich\r\nBern\n".encode())
    assert read_documents(path).texts == ["Zürich\nBern\n"]


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "n": 1}\n', encoding="utf-8")
    assert read_documents(path).texts == ["one", "two"]


def test_json_lines_of_another_field(tmp_path):
    path = tmp_path / "a.data"
    path.write_text(json.dumps({"body": "one"}), encoding="utf-8")
    assert read_documents(path, format="jsonl", field="body").texts == ["one"]


def test_bytes_that_are_no_utf8_are_named_by_position(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\nsecond \xff\n")
    with pytest.raises(ValueError, match=r"0xff at position 13 \(line 2\)"):
        read_documents(path)


@pytest.mark.parametrize(("content", "message"), [(b"", "it is empty"), (b" \n\t", "only white space")])
def test_no_text(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not JSON"), ('{"txt": "a"}', r"line 2 has no text under 'text'; it has \['txt'\]"), ("3", "int")],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_documents(path)


def test_missing_paths_folders_and_formats(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_documents(tmp_path / "nothing.txt")
    with pytest.raises(IsADirectoryError):
        read_documents(tmp_path, format="text")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="format must be one of"):
        read_documents(tmp_path / "a.txt", format="csv")


def test_a_datasets_folder_without_the_extra_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"moesaic\[datasets\]"):
        read_documents(tmp_path)


def test_a_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets", reason='needs pip install "moesaic[datasets]"')
    data = datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]})
    data.save_to_disk(tmp_path / "single")
    assert read_documents(tmp_path / "single").texts == ["one", "two"]
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "several")
    assert read_documents(tmp_path / "several", subset="test").texts == ["one"]
    with pytest.raises(ValueError, match=r"\['test', 'train'\]"):
        read_documents(tmp_path / "several")
    with pytest.raises(ValueError, match="columns"):
        read_documents(tmp_path / "single", field="body")
    with pytest.raises(ValueError, match="save_to_disk"):
        read_documents(tmp_path)


def test_splits_are_contiguous_and_complete():
    text = "".join(chr(97 + i % 26) for i in range(1001))
    parts = Documents([text], "x").split([0.85, 0.05, 0.1])
    assert "".join(part.texts[0] for part in parts) == text
    assert [len(part.texts[0]) for part in parts] == [851, 50, 100]
    documents = [str(i) for i in range(10)]
    parts = Documents(documents, "x").split([0.8, 0.2])
    assert [list(part.texts) for part in parts] == [documents[:8], documents[8:]]


def test_splits_that_would_be_empty_or_too_much():
    with pytest.raises(ValueError, match="is empty: it has only 3 documents"):
        Documents(["a", "b", "c"], "x").split([0.9, 0.1])
    with pytest.raises(ValueError, match="sum to at most 1"):
        Documents(["abc"], "x").split([0.9, 0.2])
