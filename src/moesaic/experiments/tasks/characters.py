"""Tiny Shakespeare by characters: the bundled text, split by position."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.data.text import SHAKESPEARE


class Characters:
    """The bundled text as character ids, the last part held out.

    Args:
        held_out: share of the text, from its end, for validation.

    Raises:
        ValueError: a share outside (0, 1).
    """

    def __init__(self, held_out: float = 0.1) -> None:
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must lie in (0, 1), got {held_out}")
        text = SHAKESPEARE.read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        index = {character: position for position, character in enumerate(self.alphabet)}
        ids = torch.tensor([index[character] for character in text])
        cut = round(len(ids) * (1 - held_out))
        self.train, self.validation = ids[:cut], ids[cut:]

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(B, S + 1) random windows of the training part."""
        starts = torch.randint(len(self.train) - length, (count, 1), generator=generator)
        return self.train[starts + torch.arange(length + 1)]

    def windows(self, length: int, limit: int | None = None) -> Tensor:
        """(W, S + 1) windows that tile the held-out part: every character but the first is predicted once.

        Args:
            length: S.
            limit: at most so many, from the start.
        """
        count = (len(self.validation) - 1) // length
        starts = torch.arange(count if limit is None else min(count, limit))[:, None] * length
        return self.validation[starts + torch.arange(length + 1)]
