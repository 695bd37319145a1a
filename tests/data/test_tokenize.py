"""Tokenizers: round trips, fast paths equal to the library, refusals."""

from __future__ import annotations

import pytest
import tokenizers
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


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(text=st.text(max_size=40).filter(plain))
def test_a_stream_gives_whole_characters_as_soon_as_they_are(kind, text):
    tokenizer = TRAINED[kind]
    stream, shown, ids = tokenizer.stream(), "", tokenizer.encode(text).tolist()
    for count, token in enumerate(ids, 1):
        shown += stream.push(token)
        assert text.startswith(shown)
        assert tokenizer.decode(ids[:count]) == shown  # a sample may stop anywhere
    assert shown == text


def test_samples_end_on_whole_characters():
    tokenizer = TRAINED["byte"]
    for cut, shown in ((1, "é"), (2, "é"), (3, "é"), (4, "é😀")):
        assert tokenizer.decode([*"é".encode(), *"😀".encode()[:cut]]) == shown
    assert tokenizer.decode("日".encode()[:2]) == ""
    assert tokenizer.decode([0xE6, ord("x")]) == "\ufffdx"  # it can never become a character
    assert tokenizer.decode("\ufffd".encode()) == "\ufffd"  # a mark of the text itself stays


def test_tokens_of_a_cut_out_show_no_half_characters():
    tokenizer = TRAINED["byte"]
    ids = tokenizer.encode("日本 é").tolist()
    assert tokenizer.pieces(ids[1:]) == ["", "", "", "", "本", " ", "", "é"]
    assert tokenizer.pieces(ids[1:4]) == ["", "", ""]
    learned = Tokenizer.train("bpe", ["日本日本日本日本 😀😀😀"] * 3, vocab_size=259)
    ids = learned.encode("日本 😀").tolist()
    assert len(ids) < len("日本 😀".encode())  # some tokens are parts of characters
    assert "".join(learned.pieces(ids)) == "日本 😀"
    assert "\ufffd" not in "".join(learned.pieces(ids[:-1]))


def test_special_tokens_and_other_tokenizers_stream_as_they_decode():
    tokenizer = Tokenizer.train("byte", ["a", "b"])
    assert tokenizer.end_id is not None
    assert tokenizer.decode([*b"ab", tokenizer.end_id, *b"c", tokenizer.end_id]) == "abc"
    letters = Tokenizer.train("char", ["né \ufffd日"])
    stream = letters.stream()
    assert [stream.push(i) for i in letters.encode("日\ufffdé n")] == list("日\ufffdé n")


def test_byte_tokens_of_other_tokenizers_are_held_back():
    vocabulary = {"<unk>": 0, "\u2581a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    base = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    base.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    tokenizer = Tokenizer(base)
    ids = [1, *(2 + byte for byte in "é😀".encode()), 1]
    stream = tokenizer.stream()
    assert [stream.push(i) for i in ids] == [" a", "", "é", "", "", "", "😀", " a"]
    assert tokenizer.decode(ids[:2]) == " a"
    assert tokenizer.decode(ids[:5]) == " aé"


TRAINED = {kind: Tokenizer.train(kind, [TEXT], vocab_size=300) for kind in ("byte", "bpe")}
