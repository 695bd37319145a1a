"""Tokenizers: round trips, fast paths equal to the library, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from moesaic.data.tokenize import Tokenizer, byte_letters

TEXT = "The cat sat.\nThe dog didn't sit; it's 42 years old!\n\n  Zürich, naïve 日本 😀\n" * 3


def plain(text: str) -> bool:
    return "<|endoftext|>" not in text


@given(st.text().filter(plain))
def test_bytes_round_trip_any_text(text):
    tokenizer = Tokenizer.train("byte", [TEXT])
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text


@given(st.text().filter(plain))
def test_bpe_round_trips_any_text(text):
    tokenizer = Tokenizer.train("bpe", [TEXT], vocab_size=300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_fast_paths_equal_the_library(kind):
    tokenizer = Tokenizer.train(kind, [TEXT], vocab_size=320)
    assert tokenizer.encode(TEXT).tolist() == tokenizer.base.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_long_text_cut_into_pieces_gives_the_same_ids():
    tokenizer = Tokenizer.train("bpe", [TEXT], vocab_size=320)
    long = TEXT * 400 + "tail \n\n \n end\n"
    assert tokenizer.encode(long).tolist() == tokenizer.base.encode(long, add_special_tokens=False).ids


def test_byte_letters_are_the_bytes():
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert letters["A"] == 65


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_saved_file_reads_back_here_and_in_transformers(tmp_path, kind):
    tokenizer = Tokenizer.train(kind, [TEXT, "Second."], vocab_size=320)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path)
    assert (again.vocab_size, again.end_id) == (tokenizer.vocab_size, tokenizer.end_id)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT).tolist()


def test_documents_end_with_the_end_token():
    tokenizer = Tokenizer.train("char", ["ab", "ba"])
    assert tokenizer.vocab_size == 3
    assert tokenizer.encode_documents(["ab", "b"]).tolist() == [0, 1, 2, 1, 2]
    assert Tokenizer.train("char", ["ab"]).end_id is None


def test_unknown_characters_are_named():
    tokenizer = Tokenizer.train("char", ["abc"])
    with pytest.raises(ValueError, match="'é' at position 2 is not in the vocabulary of 3"):
        tokenizer.encode("abé")
    with pytest.raises(ValueError, match="'A' at position 0"):
        tokenizer.encode("A")


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="tokenizer must be one of"):
        Tokenizer.train("word", ["a"])
    with pytest.raises(ValueError, match="texts are empty"):
        Tokenizer.train("char", [""])
    with pytest.raises(ValueError, match="at least 257"):
        Tokenizer.train("bpe", ["a"], vocab_size=256)
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path)
