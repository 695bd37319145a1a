"""The principal subspace of a stream of vectors, by the Generalized Hebbian Algorithm."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.formats.arguments import check_count
from moesaic.routing.checks import checking
from moesaic.routing.state import StepState, reduce_sum


class GHASubspace(StepState):
    r"""Leading eigenvectors of :math:`E[x x^\top]`, tracked by Sanger's rule (Generalized Hebbian Algorithm, 1989).

    With :math:`Y = X V^\top` over N rows, :math:`C = Y^\top X / N` and :math:`G = Y^\top Y / N`,

    .. math:: V \leftarrow V + \eta \, (C - \mathrm{tril}(G)\, V), \qquad v_k \leftarrow v_k / \lVert v_k \rVert,

    the lower triangle with its diagonal. All rows move at once from the old V. The inputs are not centred. Rows tend
    to the eigenvectors in descending order of their eigenvalues, up to sign; those are fixed points.

    :meth:`update` moves the basis at once, :meth:`gather` collects and :meth:`end_step` moves it once per optimizer
    step. Both agree across the ranks of the default process group, every one of which must call them.

    Args:
        dim: D.
        num_components: K, rows of the basis, at most D.
        lr: step size :math:`\eta`.
        iters: updates in one go.

    Raises:
        ValueError: K outside [1, D]; a non-positive ``lr`` or ``iters``.
    """

    basis_KD: Tensor

    def __init__(self, dim: int, num_components: int, lr: float = 5e-5, iters: int = 1) -> None:
        super().__init__()
        dim = check_count("dim", dim)
        num_components = check_count("num_components", num_components, 1, dim, f"dim = {dim}")
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"lr must be finite and > 0, got {lr}")
        iters = check_count("iters", iters)
        self.dim = dim
        self.num_components = num_components
        self.lr = lr
        self.iters = iters
        self.register_buffer("basis_KD", torch.empty(num_components, dim, dtype=torch.float32))
        # Plain attributes, not buffers: they live inside a step or a block and belong to no checkpoint.
        self._pending: tuple[Tensor, ...] | None = None
        self._marked_KD: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows of standard normal numbers, each brought to length 1; they are not made orthogonal."""
        self.basis_KD.normal_()
        self.basis_KD.div_(self.basis_KD.norm(dim=1, keepdim=True))

    @torch.no_grad()
    def update(self, x: Tensor, *, lr: float | None = None, iters: int | None = None, reduce: bool = True) -> None:
        """Move the basis by a batch.

        Args:
            x: (..., D) rows; an empty batch leaves the basis as it is.
            lr: instead of that of the constructor.
            iters: instead of that of the constructor.
            reduce: sum statistics over ranks.

        Raises:
            ValueError: another width; rows that are not finite. The basis is unchanged then.
        """
        iters = self.iters if iters is None else iters
        sums = self._sums(self._rows(x), iters)
        self._move(tuple(reduce_sum(part) for part in sums) if reduce else sums, self.lr if lr is None else lr, iters)

    @torch.no_grad()
    def gather(self, x: Tensor) -> None:
        """Collect a batch for :meth:`end_step`.

        Raises:
            ValueError: as :meth:`update`; what was collected before stays.
        """
        sums = self._sums(self._rows(x), self.iters)
        if self._pending is not None:
            sums = tuple(old + new for old, new in zip(self._pending, sums, strict=True))
        self._pending = sums

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the basis by everything gathered since the last call, on all ranks."""
        sums = self._pending
        self._pending = None
        if sums is None:
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                return
            sums = self._sums(self.basis_KD.new_empty((0, self.dim)), self.iters)
        self._move(tuple(reduce_sum(part) for part in sums), self.lr, self.iters)

    def project(self, x: Tensor) -> Tensor:
        """Coordinates (..., K) of ``x`` (..., D) along the rows of the basis."""
        return x.to(self.basis_KD.dtype) @ self.basis_KD.T

    def orthogonality_error(self) -> float:
        """Frobenius norm of :math:`V V^T - I`."""
        gram = self.basis_KD @ self.basis_KD.T
        return float((gram - torch.eye(self.num_components, dtype=gram.dtype, device=gram.device)).norm())

    def captured_energy(self, x: Tensor) -> float:
        """Share of the energy of ``x`` (..., D) that lies in the row span of the basis, in [0, 1]; 0 for no rows."""
        rows = self._rows(x).double()
        span_DK = torch.linalg.qr(self.basis_KD.double().T).Q
        total = rows.square().sum()
        return float((rows @ span_DK).square().sum() / total) if total > 0 else 0.0

    def mark(self) -> None:
        """Remember the basis for :meth:`reset`."""
        self._marked_KD = self.basis_KD.clone()

    def reset(self) -> None:
        """Go back to the basis that :meth:`mark` remembered.

        Raises:
            RuntimeError: nothing was marked.
        """
        if self._marked_KD is None:
            raise RuntimeError("reset goes back to the basis of the last mark(), and there was none")
        self.basis_KD.copy_(self._marked_KD)

    def extra_repr(self) -> str:
        """Sizes and pace."""
        return f"{self.num_components} of {self.dim}, lr={self.lr:g}, iters={self.iters}"

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape (..., {self.dim}), got {tuple(x.shape)}")
        rows_ND = x.detach().reshape(-1, self.dim).to(self.basis_KD.dtype)
        if checking(rows_ND) and not bool(torch.isfinite(rows_ND).all()):
            row = int(torch.nonzero(~torch.isfinite(rows_ND).all(1))[0])
            raise ValueError(f"x is not finite in row {row}; the basis is left as it was")
        return rows_ND

    def _sums(self, x_ND: Tensor, iters: int) -> tuple[Tensor, ...]:
        """Sums over rows that add up over micro-batches and ranks: their number, and C and G, or for several iterations
        the second moment from which each of them makes its own."""
        count = torch.tensor(x_ND.shape[0], dtype=torch.int64, device=x_ND.device)
        if iters > 1:
            return count, x_ND.T @ x_ND
        y_NK = x_ND @ self.basis_KD.T
        return count, y_NK.T @ x_ND, y_NK.T @ y_NK

    def _move(self, sums: tuple[Tensor, ...], lr: float, iters: int) -> None:
        count = sums[0]
        rows = count.clamp(min=1)
        basis = self.basis_KD
        if iters == 1:
            basis = sanger_step(basis, sums[1] / rows, sums[2] / rows, lr)
        else:
            moment_DD = sums[1] / rows
            for _ in range(iters):
                c_KD = basis @ moment_DD
                basis = sanger_step(basis, c_KD, c_KD @ basis.T, lr)
        # Decided on the device, without reading it: no rows, or numbers that are not finite, leave the basis alone.
        self.basis_KD.copy_(torch.where((count > 0) & torch.isfinite(basis).all(), basis, self.basis_KD))


def sanger_step(basis_KD: Tensor, c_KD: Tensor, g_KK: Tensor, lr: float) -> Tensor:
    """The basis after one update: :math:`V + \\eta (C - tril(G) V)` with rows of length 1.

    Args:
        basis_KD: V.
        c_KD: mean of y x^T.
        g_KK: mean of y y^T.
        lr: step size.
    """
    moved_KD = basis_KD + lr * (c_KD - g_KK.tril() @ basis_KD)
    return F.normalize(moved_KD, dim=1, eps=0.0)
