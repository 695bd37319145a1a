"""Byte, character and BPE tokenizers, all kept as one tokenizer.json that transformers opens too."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BaseTokenizer

from moesaic.data.decoding import StreamDecoder, byte_letters, decode_whole
from moesaic.formats.arguments import check_count
from moesaic.formats.atomic import atomic_file

KINDS = ("byte", "char", "bpe")
END = "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back, without loss.

    Args:
        base: a tokenizer of the `tokenizers` library.

    Attributes:
        base: the same.
        vocab_size: V, added tokens included.
        end_id: id that ends a document, or None.
    """

    def __init__(self, base: BaseTokenizer) -> None:
        self.base = base
        self.vocab_size: int = base.get_vocab_size(with_added_tokens=True)
        self.end_id: int | None = base.token_to_id(END)
        self._table = _character_table(base)
        self._bytes = isinstance(base.model, models.BPE) and base.get_vocab(with_added_tokens=False) == byte_letters()
        self._cuts = _splits_like_gpt2(base)

    @classmethod
    def train(cls, kind: str, texts: Sequence[str], *, vocab_size: int = 4096, end: bool | None = None) -> Tokenizer:
        """A tokenizer for ``texts``.

        Args:
            kind: ``"byte"`` (256 tokens, any text), ``"char"`` (the characters of the texts, no others) or ``"bpe"``
                (byte-level pairs learned from the texts, any text).
            texts: documents.
            vocab_size: V of ``"bpe"``, at least 257.
            end: whether there is a token that ends a document; by default when there are several documents.

        Raises:
            ValueError: an unknown kind, no text, a vocabulary too small.
        """
        if kind not in KINDS:
            raise ValueError(f"tokenizer must be one of {KINDS} or the path of a tokenizer.json, got {kind!r}")
        if not any(texts):
            raise ValueError("texts are empty: a tokenizer needs text")
        if check_count("vocab_size", vocab_size) < 257 and kind == "bpe":
            raise ValueError(f"vocab_size must be at least 257 for bpe (256 bytes and one pair), got {vocab_size}")
        special = [END] if (len(texts) > 1 if end is None else end) else []
        if kind == "char":
            letters = {letter: index for index, letter in enumerate(sorted(set().union(*texts)))}
            base = BaseTokenizer(models.WordLevel(letters, unk_token=None))
            base.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            base.decoder = decoders.Fuse()
        else:
            base = BaseTokenizer(models.BPE(byte_letters(), [], fuse_unk=False))
            base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
            base.decoder = decoders.ByteLevel()
            if kind == "bpe":
                trainer = trainers.BpeTrainer(
                    vocab_size=vocab_size,
                    special_tokens=special,
                    initial_alphabet=list(byte_letters()),
                    show_progress=False,
                )
                base.train_from_iterator(texts, trainer)
        if special:
            base.add_special_tokens(special)
        return cls(base)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json, or the one in a folder.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: a file that is no tokenizer.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {str(path)!r} does not exist")
        content = path.read_text(encoding="utf-8")
        try:
            return cls(BaseTokenizer.from_str(content))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, whole or not at all."""
        with atomic_file(path) as file:
            file.write(self.base.to_str(pretty=True).encode("utf-8"))

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of ``text``, int32.

        Raises:
            ValueError: a character that a character tokenizer does not know, with its position.
        """
        if self._bytes:
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        if self._table is None:
            pieces = _cut(text) if self._cuts else [text]
            encoded = self.base.encode_batch_fast(pieces, add_special_tokens=False)
            return np.concatenate([np.asarray(piece.ids, dtype=np.int32) for piece in encoded])
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        known = points < len(self._table)
        ids = np.where(known, self._table[np.where(known, points, 0)], -1)
        if (ids < 0).any():
            position = int(np.argmax(ids < 0))
            raise ValueError(
                f"character {text[position]!r} at position {position} is not in the vocabulary of {self.vocab_size}"
                " characters: train the tokenizer on this text too, or use byte or bpe"
            )
        return ids.astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """One stream of ids; where the tokenizer has an end token, each document ends with it."""
        pieces = []
        for text in texts:
            pieces.append(self.encode(text))
            if self.end_id is not None:
                pieces.append(np.asarray([self.end_id], dtype=np.int32))
        return np.concatenate(pieces)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; the end token is left out, and so are bytes of a last character that is not whole."""
        return decode_whole(self.base, ids)

    def stream(self, *, mid_text: bool = False) -> StreamDecoder:
        """A decoder that takes ids one by one, as a model writes them, and gives whole characters.

        Args:
            mid_text: the ids may start inside a character, as a cut-out of a text does.
        """
        return StreamDecoder(self.base, mid_text=mid_text)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token of a cut-out of a text; a character of several tokens is that of the last of them."""
        return list(map(self.stream(mid_text=True).push, ids))


def _character_table(base: BaseTokenizer) -> npt.NDArray[np.int32] | None:
    """Code point -> id for character tokenizers (100 times faster than splitting text into words of one letter)."""
    if not isinstance(base.model, models.WordLevel):
        return None
    vocab: dict[str, int] = base.get_vocab(with_added_tokens=False)
    if any(len(word) != 1 for word in vocab) or base.normalizer is not None:
        return None
    table = np.full(max(map(ord, vocab)) + 1, -1, dtype=np.int32)
    for word, index in vocab.items():
        table[ord(word)] = index
    return table


def _splits_like_gpt2(base: BaseTokenizer) -> bool:
    """Whether words are split by the byte-level rule, which never joins the two sides of a lone line break."""
    splitter = base.pre_tokenizer
    return (
        isinstance(splitter, pre_tokenizers.ByteLevel)
        and splitter.use_regex
        and not splitter.add_prefix_space
        and base.normalizer is None
    )


def _cut(text: str, size: int = 1 << 14) -> list[str]:
    """Pieces of at least ``size`` characters that can be encoded apart (and in parallel) with the same ids."""
    lone_break = re.compile(r"(?<=\S)\n(?=\S)")
    pieces, start = [], 0
    while (found := lone_break.search(text, start + size)) is not None:
        pieces.append(text[start : found.end()])
        start = found.end()
    return [*pieces, text[start:]]
