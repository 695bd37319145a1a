"""Hashed n-gram embeddings: cheap capacity at the input, one row read per order and token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.routing import ParameterSpec

# Odd 62-bit multipliers, one a place in the n-gram; products wrap around in 64 bits, which is what mixes them.
_MULTIPLIERS = (
    0x1E3779B97F4A7C15,
    0x3F58476D1CE4E5B9,
    0x14D049BB133111EB,
    0x2545F4914F6CDD1D,
    0x369DEA0F31A53F85,
    0x1B8735939E2C5A3D,
    0x27D4EB2F165667C5,
    0x3C6EF372FE94F82B,
)


class NgramEmbedding(nn.Module):
    r"""Embeddings of the n-grams that end at each token, added to the token's own (arXiv:2412.09871, arXiv:2501.16975).

    .. math:: e_t = \sum_{n \in \text{orders}} T_n[\, h_n(u_{t-n+1}, \dots, u_t) \bmod R \,]

    with the token ids u and a fixed multiplicative hash :math:`h_n`. Different n-grams may share a row. Places before
    the first token, and padded places, count as an id of their own. Tables start at zero, so that a model starts as if
    it had none; their gradients are sparse: a step costs the rows it touched, not R.

    Args:
        dim: D.
        orders: the n, each in [2, 8].
        rows: R, rows of each table.

    Shapes:
        ids_BS (B, S) int64 -> (B, S, D).

    Raises:
        ValueError: no order, an order out of range or named twice, sizes below 1.
    """

    sparse_parameters = ("table_RD",)  # their gradients are sparse; optimizers are chosen by it

    def __init__(self, dim: int, orders: Sequence[int], rows: int) -> None:
        super().__init__()
        if dim < 1 or rows < 1:
            raise ValueError(f"dim and rows must be at least 1, got {dim} and {rows}")
        orders = tuple(int(order) for order in orders)
        if not orders or len(set(orders)) != len(orders) or not all(2 <= n <= len(_MULTIPLIERS) for n in orders):
            raise ValueError(f"orders must be different numbers in [2, {len(_MULTIPLIERS)}], got {orders}")
        self.dim = dim
        self.orders = orders
        self.rows = rows
        self.history = max(orders) - 1  # tokens before the first one of a call that decide its n-grams
        self.table_RD = nn.Parameter(torch.zeros(len(orders) * rows, dim))

    @property
    def parameter_axes(self) -> Mapping[str, ParameterSpec]:
        """Axes and role of the tables, which lie one under the other."""
        return {"table_RD": ParameterSpec(("vocab", "model"), "embedding")}

    @property
    def active_parameters(self) -> int:
        """Parameters that one token reads: a row of each table."""
        return len(self.orders) * self.dim

    def forward(self, ids_BS: Tensor, past_BP: Tensor | None = None, mask_BS: Tensor | None = None) -> Tensor:
        """Sum of the n-gram embeddings of each token.

        Args:
            ids_BS: (B, S) token ids of this call.
            past_BP: (B, P) ids before them (the last ``history`` count), -1 where there is none; None at the start.
            mask_BS: (B, S) bool, False for padding.
        """
        ids = ids_BS + 1 if mask_BS is None else (ids_BS + 1) * mask_BS  # 0: nothing here
        if past_BP is not None:
            ids = torch.cat([past_BP[:, max(past_BP.shape[1] - self.history, 0) :] + 1, ids], dim=1)
        length = ids_BS.shape[1]
        ids = nn.functional.pad(ids, (max(self.history + length - ids.shape[1], 0), 0))
        last = ids.shape[1] - length
        mixed = ids[:, last:] * _MULTIPLIERS[0]
        found = []
        for back in range(1, self.history + 1):
            mixed = mixed + ids[:, last - back : last - back + length] * _MULTIPLIERS[back]
            if back + 1 in self.orders:
                # High bits depend on all bits of the product; the remainder is taken of them.
                row = (mixed ^ (mixed >> 31)).bitwise_and(2**62 - 1) % self.rows
                found.append(row + self.orders.index(back + 1) * self.rows)
        rows_OBS = torch.stack(found)
        return nn.functional.embedding(rows_OBS, self.table_RD, sparse=True).sum(0)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim}, orders={self.orders}, rows={self.rows}"
