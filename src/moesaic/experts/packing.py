"""Sub-tokens sorted by expert into blocks of one expert each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count

BLOCK_ROWS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Where each slot of each head lies in that head's packed rows.

    Attributes:
        place_HN: (H, T K) int64 packed row of each slot, P for an empty one.
        source_HP: (H, P) int64 row t that a packed row holds, T for padding.
        block_expert_HB: (H, P / block_size) int64 expert of the head that each block belongs to.
        block_size: rows of a block.
        slots: K.
    """

    place_HN: Tensor
    source_HP: Tensor
    block_expert_HB: Tensor
    block_size: int
    slots: int

    def pack(self, x_HTC: Tensor) -> Tensor:
        """(H, T, C) -> (H, P, C), zero in padding."""
        heads, _, width = x_HTC.shape
        padded = torch.cat([x_HTC, x_HTC.new_zeros((heads, 1, width))], 1)
        return padded.gather(1, self.source_HP[..., None].expand(-1, -1, width))

    def unpack(self, y_HPC: Tensor) -> Tensor:
        """(H, P, C) -> (H, T, K, C), zero in empty slots."""
        heads, _, width = y_HPC.shape
        padded = torch.cat([y_HPC, y_HPC.new_zeros((heads, 1, width))], 1)
        found = padded.gather(1, self.place_HN[..., None].expand(-1, -1, width))
        return found.view(heads, -1, self.slots, width)


def pack_tokens(ids_HTK: Tensor, num_experts: int, block_size: int = BLOCK_ROWS) -> Packing:
    """Replicate each sub-token for its K experts, sort by expert, fill every expert's rows up to whole blocks.

    All heads get the same length; what a head lacks goes to its last expert. The order inside an expert is that of the
    rows, so equal inputs give equal packings (IO-aware expert computation, arXiv:2602.04870).

    Args:
        ids_HTK: (H, T, K) int64 experts inside each head, ``num_experts`` for an empty slot.
        num_experts: experts of a head.
        block_size: rows of a block.

    Raises:
        ValueError: ids of another shape, dtype or range; a block below 1.
    """
    if ids_HTK.dim() != 3 or ids_HTK.dtype != torch.int64:
        raise ValueError(f"ids_HTK must be int64 of shape (H, T, K), got {ids_HTK.dtype} {tuple(ids_HTK.shape)}")
    check_count("block_size", block_size)
    if ids_HTK.numel() and not 0 <= int(ids_HTK.min()) <= int(ids_HTK.max()) <= num_experts:
        raise ValueError(
            f"ids_HTK must lie in 0..{num_experts}, the last for an empty slot,"
            f" got {int(ids_HTK.min())}..{int(ids_HTK.max())}"
        )
    heads, rows, slots = ids_HTK.shape
    ids_HN = ids_HTK.reshape(heads, rows * slots)
    order_HN = ids_HN.argsort(dim=1, stable=True)
    sorted_HN = ids_HN.gather(1, order_HN)
    counts_HE = torch.zeros((heads, num_experts + 1), dtype=torch.int64, device=ids_HN.device)
    counts_HE.scatter_add_(1, ids_HN, torch.ones_like(ids_HN))
    blocks_HE = (counts_HE[:, :num_experts] + block_size - 1) // block_size
    most = max(int(blocks_HE.sum(1).max()), 1) if heads else 1
    blocks_HE[:, -1] += most - blocks_HE.sum(1)
    length = most * block_size

    starts_HE = (blocks_HE.cumsum(1) - blocks_HE) * block_size
    starts_HE = torch.cat([starts_HE, starts_HE.new_full((heads, 1), length)], 1)
    firsts_HE = counts_HE.cumsum(1) - counts_HE
    rank_HN = torch.arange(rows * slots, device=ids_HN.device) - firsts_HE.gather(1, sorted_HN)
    sorted_place_HN = (starts_HE.gather(1, sorted_HN) + rank_HN).clamp(max=length)
    place_HN = torch.empty_like(ids_HN).scatter_(1, order_HN, sorted_place_HN)
    source_HP = ids_HN.new_full((heads, length + 1), rows)
    source_HP.scatter_(1, sorted_place_HN, order_HN // max(slots, 1))
    experts_E = torch.arange(num_experts, device=ids_HN.device)
    block_expert_HB = torch.stack([experts_E.repeat_interleave(blocks_E) for blocks_E in blocks_HE])
    return Packing(place_HN, source_HP[:, :length], block_expert_HB, block_size, slots)
