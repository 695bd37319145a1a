"""Feed-forward experts computed group by group in blocks that stay in cache, with the backward written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.experts.activations import Activation
from moesaic.routing.dispatch import Dispatch

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Hidden activations of one block: few enough to stay in cache, enough to make up for the cost of starting an operation.
# Fastest of 1 expert ... everything at (D, F, E, K) = (128, 256, 8, 2) and (512, 256, 64, 8) with 2048 rows on 2 cores.
BLOCK_ELEMENTS = 2**19


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """Stacked parameters of a bank of feed-forward experts; biases and ``gate_EFD`` may be None.

    ``widths`` are the hidden units that each expert really has; the rest of its storage is neither read nor given a
    gradient.
    """

    up_EFD: Tensor
    down_EOF: Tensor
    gate_EFD: Tensor | None = None
    up_bias_EF: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    down_bias_EO: Tensor | None = None
    widths: tuple[int, ...] | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The six parameters, in the order of the fields."""
        return (
            self.up_EFD,
            self.down_EOF,
            self.gate_EFD,
            self.up_bias_EF,
            self.gate_bias_EF,
            self.down_bias_EO,
        )

    @classmethod
    def stacked(cls, tensors: Sequence[Tensor | None], widths: tuple[int, ...] | None) -> Parameters:
        """From what :meth:`tensors` gives."""
        up_EFD, down_EOF, gate_EFD, up_bias_EF, gate_bias_EF, down_bias_EO = tensors
        assert up_EFD is not None and down_EOF is not None
        return cls(up_EFD, down_EOF, gate_EFD, up_bias_EF, gate_bias_EF, down_bias_EO, widths)

    def to(self, dtype: torch.dtype) -> Parameters:
        """The same in another dtype, with gradient."""
        cast = [None if p is None else p.to(dtype) for p in self.tensors()]
        return Parameters.stacked(cast, self.widths)

    def width(self, expert: int) -> int:
        """Hidden units of one expert."""
        return self.up_EFD.shape[1] if self.widths is None else self.widths[expert]


def fused_ffn(
    x_TD: Tensor,
    weights_TK: Tensor,
    dispatch: Dispatch,
    parameters: Parameters,
    activation: Activation,
    recompute: bool = False,
) -> Tensor:
    r"""Weighted sum of feed-forward experts, a few experts at a time.

    .. math:: y_t = \sum_k w_{t,k} \, (D_e \, \mathrm{act}(U_e x_t, G_e x_t) + b_e), \quad e = \mathrm{ids}_{t,k}

    No gathered input and no expert output of all N assignments is ever formed. For the backward the projections before
    the activation are kept (N x F, twice if gated), nothing else. Its gradient cannot be
    differentiated again: a backward with ``create_graph`` raises RuntimeError.

    Args:
        x_TD: (T, D) rows, of the dtype of the parameters.
        weights_TK: (T, K) combine weights.
        dispatch: who goes where.
        parameters: the bank.
        activation: between the projections; zero must map to zero.
        recompute: keep nothing and project again in the backward (about a fifth more work, no memory).

    Returns:
        (T, O) in the dtype of ``x_TD``; summed in float32 where that dtype has less.
    """
    tensors = parameters.tensors()
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, weights_TK, *tensors))
    plan = _Plan(dispatch, activation, parameters.widths, keep=training and not recompute)
    if training:
        return _FusedFFN.apply(x_TD, weights_TK, plan, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    with torch.autocast(x_TD.device.type, enabled=False):
        return _forward(x_TD, weights_TK, plan, parameters)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    dispatch: Dispatch
    activation: Activation
    widths: tuple[int, ...] | None
    keep: bool

    def blocks(self, width: int) -> Iterator[_Block]:
        """Neighbouring experts whose rows together make up a block; one expert may exceed it."""
        limit = BLOCK_ELEMENTS // width
        spans: list[tuple[int, int, int]] = []
        start = rows = 0
        for expert, count in enumerate(self.dispatch.counts):
            if spans and count and rows + count > limit:
                yield self._block(start, rows, spans)
                start, rows, spans = start + rows, 0, []
            if count:
                spans.append((expert, rows, rows + count))
                rows += count
        if spans:
            yield self._block(start, rows, spans)

    def _block(self, start: int, rows: int, spans: list[tuple[int, int, int]]) -> _Block:
        stop = start + rows
        return _Block(self.dispatch.row_N[start:stop], self.dispatch.slot_N[start:stop], spans)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Assignments of a few experts: the rows they read, their slots, and (expert, first, last + 1) inside the block."""

    row_N: Tensor
    slot_N: Tensor
    spans: list[tuple[int, int, int]]


def _forward(x_TD: Tensor, weights_TK: Tensor, plan: _Plan, parameters: Parameters) -> tuple[Tensor, list[Tensor]]:
    sum_dtype = torch.float32 if x_TD.dtype in LOW_PRECISION else x_TD.dtype
    y_TO = x_TD.new_zeros((x_TD.shape[0], parameters.down_EOF.shape[1]), dtype=sum_dtype)
    slot_weights = weights_TK.reshape(-1).to(sum_dtype)
    kept: list[Tensor] = []
    for block in plan.blocks(parameters.up_EFD.shape[1]):
        x_ND = x_TD.index_select(0, block.row_N)
        up_NF, gate_NF = _projections(x_ND, block, parameters)
        if plan.keep:
            kept += [up_NF] if gate_NF is None else [up_NF, gate_NF]
        h_NF = plan.activation(up_NF, gate_NF)
        y_NO = x_TD.new_empty((h_NF.shape[0], y_TO.shape[1]))
        for expert, first, last in block.spans:
            width = parameters.width(expert)
            down_FO = parameters.down_EOF[expert, :, :width].t()
            _project(h_NF[first:last, :width], down_FO, parameters.down_bias_EO, expert, y_NO[first:last])
        y_NO = y_NO.to(sum_dtype).mul_(slot_weights.index_select(0, block.slot_N)[:, None])
        y_TO.index_add_(0, block.row_N, y_NO)
    return y_TO.to(x_TD.dtype), kept


def _projections(x_ND: Tensor, block: _Block, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
    """What goes into the activation; zero beyond an expert's width."""
    shape = (x_ND.shape[0], parameters.up_EFD.shape[1])
    new = x_ND.new_empty if parameters.widths is None else x_ND.new_zeros
    up_NF = new(shape)
    gate_NF = None if parameters.gate_EFD is None else new(shape)
    for expert, first, last in block.spans:
        width = parameters.width(expert)
        x = x_ND[first:last]
        _project(x, parameters.up_EFD[expert, :width].t(), parameters.up_bias_EF, expert, up_NF[first:last, :width])
        if gate_NF is not None:
            assert parameters.gate_EFD is not None
            gate_DF = parameters.gate_EFD[expert, :width].t()
            _project(x, gate_DF, parameters.gate_bias_EF, expert, gate_NF[first:last, :width])
    return up_NF, gate_NF


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[expert, : weight.shape[1]], x, weight, out=out)


class _FusedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, plan: _Plan, *tensors: Tensor | None) -> Tensor:
        with torch.autocast(x_TD.device.type, enabled=False):
            parameters = Parameters.stacked(tensors, plan.widths)
            y_TO, kept = _forward(x_TD, weights_TK, plan, parameters)
        ctx.plan = plan
        ctx.save_for_backward(x_TD, weights_TK, *tensors, *kept)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Refused here and not at the second derivative, which autograd may leave out in silence.
            raise RuntimeError(
                "create_graph=True: the fused backward of experts cannot be differentiated again; compute the forward"
                ' inside moesaic.experts.backend("reference")'
            )
        x_TD, weights_TK, *rest = ctx.saved_tensors
        needs_x, needs_weights, _, *needs = ctx.needs_input_grad
        parameters = Parameters.stacked(rest[:6], ctx.plan.widths)
        with torch.autocast(x_TD.device.type, enabled=False):
            backward = _Backward(x_TD, weights_TK, ctx.plan, parameters, needs_x, needs_weights, needs)
            kept = iter(rest[6:])
            for block in ctx.plan.blocks(parameters.up_EFD.shape[1]):
                backward.block(block, dy_TO.index_select(0, block.row_N), kept)
        return backward.results()


class _Backward:
    """Gradients of everything that wants one, filled block by block; experts without rows get zero."""

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        plan: _Plan,
        parameters: Parameters,
        needs_x: bool,
        needs_weights: bool,
        needs: list[bool],
    ) -> None:
        self.x_TD, self.weights_TK, self.plan, self.parameters = x_TD, weights_TK, plan, parameters
        self.sum_dtype = torch.float32 if x_TD.dtype in LOW_PRECISION else x_TD.dtype
        self.slot_weights = weights_TK.reshape(-1).to(self.sum_dtype)
        self.dx_TD = torch.zeros_like(x_TD, dtype=self.sum_dtype) if needs_x else None
        self.dslots = torch.zeros_like(self.slot_weights) if needs_weights else None
        self.grads = [self._empty(p) if need else None for p, need in zip(parameters.tensors(), needs, strict=True)]
        self.inner = needs_x or any(grad is not None for i, grad in enumerate(self.grads) if i not in (1, 5))

    def _empty(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        if self.plan.widths is not None:
            return grad.zero_()
        for expert, count in enumerate(self.plan.dispatch.counts):
            if not count:
                grad[expert].zero_()
        return grad

    def block(self, block: _Block, dy_NO: Tensor, kept: Iterator[Tensor]) -> None:
        """Add what one block contributes; ``dy_NO`` (a copy) is overwritten."""
        bank, activation = self.parameters, self.plan.activation
        dup_EFD, ddown_EOF, dgate_EFD, dup_bias_EF, dgate_bias_EF, ddown_bias_EO = self.grads
        x_ND = self.x_TD.index_select(0, block.row_N)
        if self.plan.keep:
            up_NF = next(kept)
            gate_NF = None if bank.gate_EFD is None else next(kept)
        else:
            up_NF, gate_NF = _projections(x_ND, block, bank)
        h_NF, part_NF = activation.value(up_NF, gate_NF)
        dh_NF = torch.empty_like(h_NF) if bank.widths is None else torch.zeros_like(h_NF)
        for expert, first, last in block.spans:
            width = bank.width(expert)
            torch.mm(dy_NO[first:last], bank.down_EOF[expert, :, :width], out=dh_NF[first:last, :width])
        if self.dslots is not None:
            # <dy, D h + b> = <D^T dy, h> + <dy, b>: the expert's output itself is not needed.
            dweights_N = torch.linalg.vecdot(dh_NF.to(self.sum_dtype), h_NF.to(self.sum_dtype))
            if bank.down_bias_EO is not None:
                for expert, first, last in block.spans:
                    dweights_N[first:last] += torch.mv(dy_NO[first:last], bank.down_bias_EO[expert])
            self.dslots.index_copy_(0, block.slot_N, dweights_N)
        weights_N1 = self.slot_weights.index_select(0, block.slot_N)[:, None]
        dh_NF.mul_(weights_N1)
        dy_NO.mul_(weights_N1)
        self._parameters(block, dy_NO, h_NF, ddown_EOF, ddown_bias_EO, outer=True)
        if not self.inner:
            return
        dup_NF, dgate_NF = activation.gradient(dh_NF, up_NF, gate_NF, part_NF)
        self._parameters(block, dup_NF, x_ND, dup_EFD, dup_bias_EF)
        if dgate_NF is not None:
            self._parameters(block, dgate_NF, x_ND, dgate_EFD, dgate_bias_EF)
        if self.dx_TD is None:
            return
        dx_ND = torch.empty_like(x_ND)
        for expert, first, last in block.spans:
            width = bank.width(expert)
            dx = torch.mm(dup_NF[first:last, :width], bank.up_EFD[expert, :width], out=dx_ND[first:last])
            if dgate_NF is not None:
                assert bank.gate_EFD is not None
                dx.addmm_(dgate_NF[first:last, :width], bank.gate_EFD[expert, :width])
        self.dx_TD.index_add_(0, block.row_N, dx_ND.to(self.sum_dtype))

    def _parameters(
        self, block: _Block, dy: Tensor, x: Tensor, matrix: Tensor | None, bias: Tensor | None, *, outer: bool = False
    ) -> None:
        """Gradient of ``y = x W^T + b`` into the experts' parts of ``matrix`` and ``bias``.

        The hidden side, which is cut to each expert's width, is that of ``y``, or of ``x`` in the ``outer`` (down)
        projection.
        """
        for expert, first, last in block.spans:
            width = self.parameters.width(expert)
            dy_part, x_part = dy[first:last], x[first:last]
            dy_part, x_part = (dy_part, x_part[:, :width]) if outer else (dy_part[:, :width], x_part)
            if matrix is not None:
                torch.mm(dy_part.t(), x_part, out=matrix[expert, : dy_part.shape[1], : x_part.shape[1]])
            if bias is not None:
                torch.sum(dy_part, 0, out=bias[expert, : dy_part.shape[1]])

    def results(self) -> tuple[Tensor | None, ...]:
        """In the order of the function's inputs."""
        dx_TD = None if self.dx_TD is None else self.dx_TD.to(self.x_TD.dtype)
        dweights_TK = None
        if self.dslots is not None:
            dweights_TK = self.dslots.view(self.weights_TK.shape).to(self.weights_TK.dtype)
        return dx_TD, dweights_TK, None, *self.grads
