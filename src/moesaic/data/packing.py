"""Tokens packed into contiguous windows, in an order that (seed, stage, batch number) alone determine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.formats.arguments import check_count


@dataclass(frozen=True, eq=False)
class Batch:
    """What a step sees.

    Attributes:
        inputs_BS: (B, S) int64 token ids.
        targets_BS: (B, S) int64, the token that follows each input (no shift is left to do); -100 where none counts.
        mask_BS: (B, S) bool, False for padding, or None.
        num_targets: how many targets count; known without asking the device.
    """

    inputs_BS: Tensor
    targets_BS: Tensor
    mask_BS: Tensor | None
    num_targets: int

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        if device.type == "cpu":
            return self
        mask_BS = None if self.mask_BS is None else self.mask_BS.to(device, non_blocking=True)
        return Batch(
            self.inputs_BS.to(device, non_blocking=True),
            self.targets_BS.to(device, non_blocking=True),
            mask_BS,
            self.num_targets,
        )


class PackedTokens:
    """A stream of tokens cut into contiguous windows, shuffled anew each epoch.

    The order is a function of (seed, stage, number of the batch): a resumed run asks for the next number and replays
    nothing. Each epoch starts at another offset and visits every window once; a batch may span two epochs. Windows
    ignore document borders (the end token tells the model).

    Args:
        tokens: (N,) ids.
        seed: of the order.

    Raises:
        ValueError: tokens that are not one-dimensional.
    """

    def __init__(self, tokens: npt.NDArray[np.integer] | Tensor, *, seed: int = 0) -> None:
        stream = torch.as_tensor(tokens).to(torch.int64)
        if stream.dim() != 1:
            raise ValueError(f"tokens must have shape (N,), got {tuple(stream.shape)}")
        self.tokens = stream
        self.seed = check_count("seed", seed, 0)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def windows(self, length: int) -> int:
        """Windows an epoch when each holds ``length`` inputs.

        Raises:
            ValueError: fewer than ``length + 1`` tokens.
        """
        check_count("length", length)
        if len(self) < length + 1:
            raise ValueError(
                f"the text has {len(self)} tokens, a window of length {length} needs {length + 1}:"
                " give more text or a shorter length"
            )
        return max(1, (len(self) - length) // length)

    def batch(self, number: int, size: int, length: int, *, stage: int = 0) -> Batch:
        """Batch ``number`` (from 0) of ``size`` windows of ``length`` inputs in ``stage``."""
        windows = self.windows(length)
        rows = np.arange(number * size, (number + 1) * size)
        starts_B = np.empty(size, dtype=np.int64)
        for epoch in range(int(rows[0]) // windows, int(rows[-1]) // windows + 1):
            mine = rows // windows == epoch
            order, offset = self._epoch(stage, epoch, length)
            starts_B[mine] = order[rows[mine] % windows] * length + offset
        index_BS1 = torch.from_numpy(starts_B)[:, None] + torch.arange(length + 1)
        tokens_BS1 = self.tokens[index_BS1]
        return Batch(tokens_BS1[:, :-1], tokens_BS1[:, 1:], None, size * length)

    def _draw_epoch(self, stage: int, epoch: int, length: int) -> tuple[npt.NDArray[np.int64], int]:
        windows = self.windows(length)
        generator = np.random.Generator(np.random.PCG64([self.seed & 0xFFFFFFFF, stage, epoch, length]))
        order = generator.permutation(windows)
        slack = min(length, len(self) - windows * length)
        return order, int(generator.integers(slack))
