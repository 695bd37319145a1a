"""A text as batches for a model: with its own tokenizer, or random tokens where it has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from moesaic.data.text import SHAKESPEARE, read_documents
from moesaic.data.tokenize import Tokenizer

ROWS = 8  # sequences a batch


@dataclasses.dataclass(frozen=True)
class Reading:
    """A text ready for a model.

    Attributes:
        batches: keyword arguments of the model's forward.
        source: where the text came from, in words.
        decode: ids -> the text of each token.
    """

    batches: list[dict[str, Tensor]]
    source: str
    decode: Callable[[Sequence[int]], list[str]]


def read_batches(folder: Path, model: nn.Module, text: Path | None, tokens: int, length: int) -> Reading:
    """The first ``tokens`` tokens of a text in sequences of ``length``; the last may be shorter, none is padded.

    Args:
        folder: the checkpoint, where its tokenizer.json lies.
        model: the model, for the size of its vocabulary.
        text: a UTF-8 text file; None for the bundled Shakespeare sample.
        tokens: how many tokens to read.
        length: tokens a sequence.

    Raises:
        ValueError: a text without a tokenizer, an empty text, a text that the tokenizer cannot encode.
        FileNotFoundError: no such text.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if not (folder / "tokenizer.json").is_file():
        if text is not None:
            raise ValueError(
                f"{folder} has no tokenizer.json, so --text cannot be read: put the model's tokenizer.json there"
            )
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        return Reading(
            _cut(ids, length), "random tokens (the checkpoint has no tokenizer)", lambda row: [f"[{i}]" for i in row]
        )
    tokenizer = Tokenizer.load(folder)
    content = "\n".join(read_documents(SHAKESPEARE if text is None else text).texts)
    # A token is at most a few dozen characters, so reading a bounded prefix keeps large files cheap.
    encoded = torch.from_numpy(tokenizer.encode(content[: tokens * 32])).long()[:tokens]
    if len(encoded) < 2:
        raise ValueError(f"the text holds {len(encoded)} tokens: at least 2 are needed")
    if int(encoded.max()) >= vocabulary:
        raise ValueError(
            f"the tokenizer gives id {int(encoded.max())}, the model has {vocabulary} embeddings:"
            " tokenizer.json does not belong to it"
        )
    source = "the bundled Shakespeare sample" if text is None else str(text)
    return Reading(_cut(encoded, length), source, lambda row: [tokenizer.decode([i]) for i in row])


def _cut(ids_T: Tensor, length: int) -> list[dict[str, Tensor]]:
    whole = len(ids_T) // length * length
    rows = ids_T[:whole].view(-1, length)
    batches = [{"input_ids": rows[start : start + ROWS]} for start in range(0, len(rows), ROWS)]
    if len(ids_T) - whole >= 2 or not batches:
        batches.append({"input_ids": ids_T[whole:][None]})
    return batches
