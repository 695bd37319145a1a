"""What earlier calls saw, kept beside keys and values in a transformers cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class History:
    """Rows of earlier calls, in additional layers of the cache.

    There they are reordered by beam search, cropped by assisted decoding and dropped with the cache, as keys and values
    are; an attribute beside them would not be.

    Args:
        cache: a transformers cache, or None when nothing is kept.
        first: index of the first additional layer: the model's number of layers.
    """

    def __init__(self, cache: Any | None, first: int) -> None:
        self.cache = cache
        self.next = first

    def extend(self, rows_BSC: Tensor) -> Tensor | None:
        """Keep ``rows_BSC`` (B, S, C) and return those kept before, (B, P, C), or None; the n-th call of a forward
        continues the n-th call of the one before."""
        if self.cache is None:
            return None
        while len(self.cache.layers) <= self.next:
            self.cache.layers.append(DynamicLayer())
        layer = self.cache.layers[self.next]
        self.next += 1
        past = layer.keys[:, 0] if layer.is_initialized and layer.get_seq_length() else None
        layer.update(rows_BSC[:, None], rows_BSC[:, None, :, :0])
        return past
