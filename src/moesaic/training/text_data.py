"""The text of a run as tokens: training, held-out and test part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.data.packing import PackedTokens
from moesaic.data.text import SHAKESPEARE, read_documents
from moesaic.data.tokenize import KINDS, Tokenizer
from moesaic.training.config import BUNDLED, DataConfig


@dataclass(frozen=True, eq=False)
class TextData:
    """Tokens to train on and to evaluate with.

    Attributes:
        train: packed training tokens.
        eval_tokens: (N,) held-out tokens, or None.
        test_tokens: (N,) tokens that neither training nor evaluation reads, or None.
        tokenizer: how they were made, saved with checkpoints; None for bare tokens.
        tokens_per_character: of the held-out part, to turn nats per token into nats per character.
    """

    train: PackedTokens
    eval_tokens: Tensor | None = None
    test_tokens: Tensor | None = None
    tokenizer: Tokenizer | None = None
    tokens_per_character: float | None = None


def load_text_data(config: DataConfig, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> TextData:
    """Read, split and tokenize.

    The split is contiguous: training first, then held-out, then test. A BPE tokenizer learns from the training part
    only; a character tokenizer knows the characters of the whole text.

    Args:
        config: see :class:`DataConfig`.
        seed: of the order of windows.
        tokenizer: use this one (a resumed run's own) instead of training one.

    Raises:
        FileNotFoundError, ValueError, ImportError: see :func:`read_documents` and :class:`Tokenizer`.
    """
    path = SHAKESPEARE if config.path == BUNDLED else config.path
    documents = read_documents(path, format=config.format, field=config.field, subset=config.subset)
    shares = [1 - config.eval - config.test, config.eval, config.test]
    parts = iter(documents.split([share for share in shares if share > 0]))
    train, held_out, test = (next(parts) if share > 0 else None for share in shares)
    assert train is not None
    if tokenizer is None:
        if config.tokenizer not in KINDS:
            tokenizer = Tokenizer.load(config.tokenizer)
        else:
            texts = documents.texts if config.tokenizer == "char" else train.texts
            end = len(documents.texts) > 1
            tokenizer = Tokenizer.train(config.tokenizer, texts, vocab_size=config.vocab_size, end=end)
    eval_tokens = test_tokens = None
    per_character = None
    if held_out is not None:
        eval_tokens = torch.from_numpy(tokenizer.encode_documents(held_out.texts))
        per_character = len(eval_tokens) / max(sum(map(len, held_out.texts)), 1)
    if test is not None:
        test_tokens = torch.from_numpy(tokenizer.encode_documents(test.texts))
    packed = PackedTokens(tokenizer.encode_documents(train.texts), seed=seed)
    return TextData(packed, eval_tokens, test_tokens, tokenizer, per_character)
