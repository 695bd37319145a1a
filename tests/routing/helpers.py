"""Small parts that routing tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moesaic.experts import Experts
from moesaic.routing import Context


class MatrixBank(Experts):
    """One matrix an expert: the smallest bank with something to learn."""

    def __init__(self, dim: int, num_experts: int, seed: int = 0) -> None:
        super().__init__(dim, num_experts)
        generator = torch.Generator().manual_seed(seed)
        self.weight_EDD = nn.Parameter(torch.randn(num_experts, dim, dim, generator=generator) / dim**0.5)

    def rows(self, x_ND: Tensor, counts: Sequence[int], context: Context) -> Tensor:
        parts = [part @ weight.T for part, weight in zip(x_ND.split(list(counts)), self.weight_EDD, strict=True)]
        return torch.cat(parts)

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        return {"weight_EDD": self.weight_EDD if ids is None else self.weight_EDD[list(ids)]}


def rows(count: int, dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def padded(sequences: list[Tensor], side: str, length: int, filler: float | Tensor = 0.0) -> tuple[Tensor, Context]:
    """Sequences (S_i, D) as flattened rows of one padded batch, with their context."""
    dim = sequences[0].shape[1]
    x_BSD = torch.zeros(len(sequences), length, dim, dtype=sequences[0].dtype) + filler
    mask_BS = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(length - len(sequence), length) if side == "left" else slice(0, len(sequence))
        x_BSD[row, where] = sequence
        mask_BS[row, where] = True
    return x_BSD.reshape(-1, dim), Context.from_mask(mask_BS, len(sequences), length)
