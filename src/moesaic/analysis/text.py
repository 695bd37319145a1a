"""A text as batches for a model: with its own tokenizer, or random tokens where it has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.analysis.machine import available_memory
from moesaic.data.text import SHAKESPEARE, read_documents
from moesaic.data.tokenize import Tokenizer

ROWS = 8  # sequences a batch
_BYTES_AN_ID = 8


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
        ValueError: a text without a tokenizer, an empty text, a text that the tokenizer cannot encode; more tokens, or
            longer sequences, than the free memory holds.
        FileNotFoundError: no such text.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    _check_length(min(length, tokens), tokens, vocabulary)
    if not (folder / "tokenizer.json").is_file():
        if text is not None:
            raise ValueError(
                f"{folder} has no tokenizer.json, so --text cannot be read: put the model's tokenizer.json there"
            )
        _check_memory("tokens", tokens, tokens * _BYTES_AN_ID, "random token ids")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        return Reading(
            _cut(ids, length, model),
            "random tokens (the checkpoint has no tokenizer)",
            lambda row: [f"[{i}]" for i in row],
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
    return Reading(_cut(encoded, length, model), source, tokenizer.pieces)


def _check_length(length: int, tokens: int, vocabulary: int) -> None:
    rows = min(ROWS, -(-tokens // length))
    _check_memory("length", length, rows * length * vocabulary * 4, "the logits of one batch")


def _check_memory(name: str, value: int, size: int, what: str) -> None:
    free = available_memory()
    if size > free:
        raise ValueError(
            f"{name} (--{name}) is {value:,}: {what} alone would take {size / 1e9:,.1f} GB and {free / 1e9:,.1f} GB of"
            f" memory are free; at most about {int(value * free / size):,} fit"
        )


def _cut(ids_T: Tensor, length: int, model: nn.Module) -> list[dict[str, Tensor]]:
    whole = len(ids_T) // length * length
    rows = ids_T[:whole].view(-1, length)
    batches = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    if len(ids_T) - whole >= 2 or not batches:
        batches.append(ids_T[whole:][None])
    return [_inputs(ids_BS, model) for ids_BS in batches]


def _inputs(ids_BS: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The model's arguments; an encoder-decoder reads the text and writes it, each token after the one before."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids_BS}
    first = getattr(config, "decoder_start_token_id", None)
    start = ids_BS.new_full((len(ids_BS), 1), 0 if first is None else int(first))
    return {"input_ids": ids_BS, "decoder_input_ids": torch.cat([start, ids_BS[:, :-1]], 1)}
