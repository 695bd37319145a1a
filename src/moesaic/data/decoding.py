"""Text of token ids as they come, in whole characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as BaseTokenizer
from tokenizers import decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MARK = "\ufffd"


class StreamDecoder:
    """Turns ids into text one by one; bytes of a character are held back until it is whole.

    A token of a byte-level tokenizer may end inside a character, and its text alone would be a replacement mark. Bytes
    that can no longer become a character do give one.

    Args:
        base: a tokenizer of the `tokenizers` library.
        mid_text: the ids may start inside a character, whose end then gives no text.
    """

    def __init__(self, base: BaseTokenizer, *, mid_text: bool = False) -> None:
        self._base = base
        self._added = base.get_added_tokens_decoder()
        self._letters = byte_letters() if isinstance(base.decoder, decoders.ByteLevel) else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._orphans = 3 if mid_text else 0
        self._ids: list[int] = []  # without byte letters: the ids of the last text and those behind it
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that is whole with this token; empty while a character lacks bytes, and for special tokens."""
        token = int(token)
        added = self._added.get(token)
        if added is not None and added.special:
            return ""
        if self._letters is None:
            return self._push_text(token)
        if added is not None:
            return self._utf8.decode(added.content.encode())
        data = b"".join(self._bytes_of(letter) for letter in self._base.id_to_token(token) or "")
        while self._orphans and data:
            if not 0x80 <= data[0] < 0xC0:  # a byte that starts a character
                self._orphans = 0
                break
            data, self._orphans = data[1:], self._orphans - 1
        return self._utf8.decode(data)

    def _bytes_of(self, letter: str) -> bytes:
        assert self._letters is not None
        byte = self._letters.get(letter)
        return letter.encode() if byte is None else bytes([byte])

    def _push_text(self, token: int) -> str:
        """For other tokenizers: what the library's text has grown by; a byte token may be a part of a character."""
        self._ids.append(token)
        before = self._base.decode(self._ids[: self._shown], skip_special_tokens=True)
        text = self._base.decode(self._ids, skip_special_tokens=True)
        if text.endswith(_MARK) and _is_byte_token(self._base, token):
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return str(text[len(before) :])


def decode_whole(base: BaseTokenizer, ids: Sequence[int]) -> str:
    """Text of ``ids`` without special tokens, up to the last whole character."""
    numbers = [int(i) for i in ids]
    if isinstance(base.decoder, decoders.ByteLevel):
        stream = StreamDecoder(base)
        return "".join(map(stream.push, numbers))
    text = str(base.decode(numbers, skip_special_tokens=True))
    # One byte too few turns all byte tokens of a run into marks, so the last ones are left out and it is tried again.
    kept, whole = list(numbers), text
    while whole.endswith(_MARK) and len(numbers) - len(kept) < 4 and _is_byte_token(base, kept[-1]):
        kept.pop()
        whole = str(base.decode(kept, skip_special_tokens=True))
        if not (kept and _is_byte_token(base, kept[-1]) and whole.endswith(_MARK)):
            return whole
    return text


def _is_byte_token(base: BaseTokenizer, token: int) -> bool:
    return _BYTE_TOKEN.fullmatch(base.id_to_token(token) or "") is not None


def byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in byte-level tokenizers -> the byte, which is its id.

    Printable Latin-1 bytes stand for themselves, the others for the code points from 256 on, in order of the byte.
    """
    letters = {}
    spare = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            letters[chr(byte)] = byte
        else:
            letters[chr(spare)] = byte
            spare += 1
    return letters
