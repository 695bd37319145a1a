"""Grouped-query attention with rotary positions and optional QK-norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.layers.norm import Norm
from moesaic.layers.rotary import rotate

# transformers' attention interface: (module, q_BHSC, k_BHSC, v_BHSC, mask, scaling=..., dropout=...) -> y_BSHC, weights
AttentionFunction = Callable[..., tuple[Tensor, Any]]


QK_NORMS = (True, False, "head", "full")


class Attention(nn.Module):
    r"""Causal self-attention with H query heads over H / g key-value heads (arXiv:2305.13245).

    Args:
        dim: D.
        num_heads: H.
        num_kv_heads: key-value heads; divides H.
        head_dim: width of a head, even; D / H by default.
        qk_norm: normalise queries and keys (arXiv:2302.05442), with learned scale: True or ``"head"`` for each head by
            itself, ``"full"`` for all heads together (OLMoE), False for neither.
        norm: kind of that norm.
        eps: of that norm.
        scale: factor on the scores; 1 / sqrt(head_dim) by default.

    Shapes:
        x_BSD -> (B, S, D).

    Raises:
        ValueError: heads that do not divide, an odd head width.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qk_norm: bool | str = True,
        norm: str = "rms",
        eps: float = 1e-6,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        dim, num_heads = check_count("dim", dim), check_count("num_heads", num_heads)
        if num_heads % check_count("num_kv_heads", num_kv_heads):
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"num_heads must divide dim = {dim} when head_dim is not given, got {num_heads}")
            head_dim = dim // num_heads
        if check_count("head_dim", head_dim) % 2:
            raise ValueError(f"head_dim must be even and at least 2 (rotary turns pairs), got {head_dim}")
        if qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm must be one of {QK_NORMS}, got {qk_norm!r}")
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_key_value_groups = num_heads // num_kv_heads
        self.scaling = head_dim**-0.5 if scale is None else scale
        self.is_causal = True
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.full_norm = qk_norm == "full"
        widths = (num_heads * head_dim, num_kv_heads * head_dim) if self.full_norm else (head_dim, head_dim)
        self.q_norm = Norm(widths[0], norm, eps) if qk_norm else None
        self.k_norm = Norm(widths[1], norm, eps) if qk_norm else None

    def forward(
        self,
        x_BSD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: AttentionFunction,
        mask: Tensor | None = None,
        extend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend.

        Args:
            x_BSD: normalised input.
            rotary: cosine and sine of the positions.
            attend: an attention function of transformers' interface.
            mask: as that function wants it; None for plain causal attention.
            extend: takes the new keys and values and returns all, the cached ones included.
            **options: for ``attend``.
        """
        q, k, v = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        if self.full_norm and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        shape = (*x_BSD.shape[:2], -1, self.head_dim)
        q, k, v = (tensor.view(shape) for tensor in (q, k, v))
        if not self.full_norm and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if extend is not None:
            k, v = extend(k, v)
        y, _ = attend(self, q, k, v, mask, scaling=self.scaling, dropout=0.0, **options)
        out: Tensor = self.o_proj(y.reshape(*x_BSD.shape[:2], -1))
        return out
