"""Rows sorted by expert: the one order in which every bank works."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Dispatch:
    """The N filled slots of a routing, grouped by expert, in row order inside each expert.

    Attributes:
        row_N: (N,) int64, the row that an assignment reads.
        slot_N: (N,) int64, its position in the flattened (T, K) slots.
        counts: assignments of each expert, E numbers that sum to N.
        num_slots: T * K.
    """

    row_N: Tensor
    slot_N: Tensor
    counts: list[int]
    num_slots: int

    @classmethod
    def of(cls, expert_ids_TK: Tensor, num_experts: int) -> Dispatch:
        """Sort the slots of ``expert_ids_TK`` (T, K) by expert; empty slots (id ``num_experts``) are left out."""
        flat = expert_ids_TK.reshape(-1)
        counts_E1 = torch.bincount(flat, minlength=num_experts + 1)
        counts: list[int] = counts_E1.tolist()
        if len(counts) > num_experts + 1:
            raise ValueError(
                f"expert_ids_TK holds {len(counts) - 1}; allowed are 0..{num_experts}, the last for an empty slot"
            )
        filled = flat.numel() - counts[num_experts]
        slot_N = torch.argsort(flat, stable=True)[:filled]  # the empty id is the largest, so empty slots come last
        width = max(expert_ids_TK.shape[1], 1)
        return cls(slot_N // width, slot_N, counts[:num_experts], flat.numel())

    def slots(self, values_NO: Tensor) -> Tensor:
        """Put one value an assignment back into its slot: (N, O) -> (T * K, O), exactly zero in empty slots."""
        out = values_NO.new_zeros((self.num_slots, *values_NO.shape[1:]))
        return out.index_copy(0, self.slot_N, values_NO)
