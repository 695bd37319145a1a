"""N-gram embeddings, hashed or of a vocabulary: cheap capacity at the input, one row read per order and token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
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

_FREE = 2**63 - 1  # larger than any key


class NgramEmbedding(nn.Module):
    r"""Embeddings of the n-grams that end at each token, added to the token's own (arXiv:2412.09871, arXiv:2501.16975).

    .. math:: e_t = \sum_{n \in \text{orders}} T_n[\, h_n(u_{t-n+1}, \dots, u_t) \bmod R \,]

    with the token ids u and a fixed multiplicative hash :math:`h_n`. Different n-grams may share a row. Places before
    the first token, and padded places, count as an id of their own. Tables start at zero, so that a model starts as if
    it had none; their gradients are sparse: a step costs the rows it touched, not R.

    With ``min_count`` the tables hold a vocabulary instead, learned by :meth:`fit`: the R most frequent n-grams of a
    text that occur at least so often. An n-gram outside it adds nothing, where hashing reads the row of another one.

    Args:
        dim: D.
        orders: the n, each in [2, 8].
        rows: R, rows of each table.
        min_count: None to hash, or how often an n-gram must occur to have a row, at least 1.

    Shapes:
        ids_BS (B, S) int64 -> (B, S, D).

    Raises:
        ValueError: no order, an order out of range or named twice, sizes below 1.
    """

    sparse_parameters = ("table_RD",)  # their gradients are sparse; optimizers are chosen by it

    def __init__(self, dim: int, orders: Sequence[int], rows: int, min_count: int | None = None) -> None:
        super().__init__()
        dim, rows = check_count("dim", dim), check_count("rows", rows)
        orders = tuple(check_count("orders", order, 2, len(_MULTIPLIERS)) for order in orders)
        if not orders or len(set(orders)) != len(orders):
            raise ValueError(f"orders must be different numbers in [2, {len(_MULTIPLIERS)}], got {orders}")
        min_count = None if min_count is None else check_count("min_count", min_count)
        self.dim = dim
        self.orders = orders
        self.min_count = min_count
        self.rows = rows
        self.history = max(orders) - 1  # tokens before the first one of a call that decide its n-grams
        self.table_RD = nn.Parameter(torch.zeros(len(orders) * rows, dim))
        self.key_OR: Tensor | None  # of each row's n-gram, ascending; what is free lies behind
        self.register_buffer("key_OR", None if min_count is None else torch.full((len(orders), rows), _FREE))

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
        key_OBS = self._keys(ids, ids_BS.shape[1])
        first_row_O11 = torch.arange(len(self.orders), device=ids.device)[:, None, None] * self.rows
        if self.key_OR is None:
            row_OBS = key_OBS % self.rows + first_row_O11
            return nn.functional.embedding(row_OBS, self.table_RD, sparse=True).sum(0)
        row_OBS = torch.searchsorted(self.key_OR, key_OBS.flatten(1)).clamp_max(self.rows - 1)
        known_OBS = (self.key_OR.gather(1, row_OBS) == key_OBS.flatten(1)).view(key_OBS.shape)
        rows_K = (row_OBS.view(key_OBS.shape) + first_row_O11)[known_OBS]
        token_K = torch.arange(ids_BS.numel(), device=ids.device).view(ids_BS.shape).expand_as(known_OBS)[known_OBS]
        found_KD = nn.functional.embedding(rows_K, self.table_RD, sparse=True)
        sum_TD = found_KD.new_zeros(ids_BS.numel(), self.dim).index_add(0, token_K, found_KD)
        return sum_TD.view(*ids_BS.shape, self.dim)

    @torch.no_grad()
    def fit(self, ids_N: Tensor) -> None:
        """Learn the vocabulary of n-grams from the training text; rows that were learned lose their meaning.

        Args:
            ids_N: (N,) int64 token ids.

        Raises:
            ValueError: tables that hash, or a text that is not (N,).
        """
        if self.min_count is None or self.key_OR is None:
            raise ValueError("min_count is None: hashed tables have no vocabulary to fit")
        if ids_N.dim() != 1:
            raise ValueError(f"ids_N must have shape (N,), got {tuple(ids_N.shape)}")
        key_ON = self._keys(ids_N[None].to(torch.int64) + 1, len(ids_N))[:, 0]
        self.key_OR.fill_(_FREE)
        for order, key_N in enumerate(key_ON):
            key, count = key_N.unique(return_counts=True)
            key, count = key[count >= self.min_count], count[count >= self.min_count]
            most = count.argsort(descending=True, stable=True)[: self.rows]
            kept = key[most].sort().values
            self.key_OR[order, : len(kept)] = kept

    def _keys(self, ids: Tensor, length: int) -> Tensor:
        """(O, B, length): a number of 62 bits for each n-gram that ends at one of the last ``length`` ids."""
        ids = nn.functional.pad(ids, (max(self.history + length - ids.shape[1], 0), 0))
        last = ids.shape[1] - length
        mixed = ids[:, last:] * _MULTIPLIERS[0]
        found: dict[int, Tensor] = {}
        for back in range(1, self.history + 1):
            mixed = mixed + ids[:, last - back : last - back + length] * _MULTIPLIERS[back]
            if back + 1 in self.orders:
                # High bits depend on all bits of the product; the key is made of them.
                found[back + 1] = (mixed ^ (mixed >> 31)).bitwise_and(2**62 - 1)
        return torch.stack([found[order] for order in self.orders])

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.dim}, orders={self.orders}, rows={self.rows}, min_count={self.min_count}"
