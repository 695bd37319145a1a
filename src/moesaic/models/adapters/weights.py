"""A foreign bank of experts, read and written in one convention whatever its layout."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.experts.fused import LOW_PRECISION, Parameters
from moesaic.models.adapters.bank import ForeignBank
from moesaic.routing import Routing
from moesaic.routing.dispatch import Dispatch


class ForeignExperts(ForeignBank):
    """A stacked bank: one module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` of three axes.

    Args:
        module: that module; it takes (x, ids, weights).
        name: its path in the model, for messages.

    Raises:
        ValueError: parameters whose shapes do not say one layout.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.has_gate = bool(getattr(module, "has_gate", hasattr(module, "gate_up_proj")))
        self.concatenated = bool(getattr(module, "is_concatenated", True))
        first, down = self._first, self._parameter("down_proj")
        self.transposed = bool(getattr(module, "is_transposed", self._looks_transposed(first, down)))
        super().__init__(
            module,
            name,
            num_experts=int(down.shape[0]),
            dim=int(first.shape[1 if self.transposed else 2]),
            out_dim=int(down.shape[2 if self.transposed else 1]),
            width=int(down.shape[1 if self.transposed else 2]),
        )
        rows = int(first.shape[2 if self.transposed else 1])
        if rows != (2 if self.has_gate else 1) * self.width:
            raise ValueError(
                f"{name}: {self._first_name} {tuple(first.shape)} and down_proj {tuple(down.shape)} do not fit one"
                f" layout (is_transposed={self.transposed}, has_gate={self.has_gate})"
            )
        self.identities = int(first.shape[0]) - self.num_experts

    def _looks_transposed(self, first: Tensor, down: Tensor) -> bool:
        """Whether only the transposed reading fits: with a gate, 2F beside F leaves no doubt."""
        return self.has_gate and first.shape[1] != 2 * down.shape[2] and first.shape[2] == 2 * down.shape[1]

    @property
    def _first_name(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def _first(self) -> Tensor:
        return self._parameter(self._first_name)

    def _parameter(self, name: str) -> Tensor:
        value = getattr(self.module, name, None)
        if not isinstance(value, Tensor):
            raise ValueError(f"{self.name} ({type(self.module).__name__}) has no tensor {name}")
        return value

    def parameters(self) -> Parameters:
        """The bank's tensors as the fused computation takes them, views with gradient.

        Where gate and up are one tensor they stay one matrix (E, 2F, D), under the name ``up`` and in the order of
        storage, which :meth:`activate` knows.
        """
        first, down = self._first[: self.num_experts], self._parameter("down_proj")
        if self.transposed:
            first, down = first.transpose(1, 2), down.transpose(1, 2)
        biases = [getattr(self.module, name, None) for name in (f"{self._first_name}_bias", "down_proj_bias")]
        return Parameters(first, down, up_bias_EF=biases[0], down_bias_EO=biases[1])

    def activate(self, first_NH: Tensor) -> Tensor:
        """What the bank does between its projections: (N, 2F), in the order of storage, or (N, F), to (N, F)."""
        act: Any = self.activation
        apply_gate: Any = getattr(self.module, "_apply_gate", None)
        if not self.has_gate:
            h_NF: Tensor = act(first_NH)
        elif apply_gate is not None:
            h_NF = apply_gate(first_NH)
        else:
            parts = self._halves(first_NH, 1)
            h_NF = act(parts["gate"]) * parts["up"]
        return h_NF

    @property
    def activation(self) -> Any:
        """The module's nonlinearity."""
        return getattr(self.module, "act_fn", None)

    def views(self) -> dict[str, Tensor]:
        """See :class:`ForeignBank`."""
        axis = 2 if self.transposed else 1
        experts = slice(0, self.num_experts)  # identity experts have rows here without a function
        first, down = self._first[experts], self._parameter("down_proj")
        halves = self._halves(first, axis)
        if self.transposed:
            halves = {name: half.transpose(1, 2) for name, half in halves.items()}
            down = down.transpose(1, 2)
        found = {**halves, "down": down}
        for name in (f"{self._first_name}_bias", "down_proj_bias"):
            bias = getattr(self.module, name, None)
            if isinstance(bias, Tensor):
                parts = {"down": bias} if name.startswith("down") else self._halves(bias, 1)
                found.update({f"{part}_bias": value for part, value in parts.items()})
        return found

    def _halves(self, stacked: Tensor, axis: int) -> dict[str, Tensor]:
        if not self.has_gate:
            return {"up": stacked}
        if self.concatenated:
            return {"gate": stacked.narrow(axis, 0, self.width), "up": stacked.narrow(axis, self.width, self.width)}
        every_second = [slice(None)] * axis
        return {
            "gate": stacked[(*every_second, slice(0, None, 2))],
            "up": stacked[(*every_second, slice(1, None, 2))],
        }

    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """See :class:`ForeignBank`."""
        named = (*self.module.named_parameters(recurse=False), *self.module.named_buffers(recurse=False))
        return [(key, self.module, 1) for key, value in named if value.dim()]

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`."""
        ids, weights = fill_empty(routing)
        if ids.shape[1] == 1 and not hasattr(self.module, "is_transposed"):
            # A bank outside transformers' interface may squeeze an axis of one slot away (longcat_flash of 5.24 does).
            ids, weights = ids.expand(-1, 2), F.pad(weights, (0, 1))
        y_TO: Tensor = self.module(x_TD, ids, weights.to(x_TD.dtype))
        return y_TO


def fill_empty(routing: Routing, spare_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids and weights that any bank can run: an empty slot repeats an expert of its row, with weight 0.

    Banks of transformers differ in what they do with the id E: some skip it, some crash, some compute garbage.
    Repeating an expert of the same row runs none that the row would not run anyway, so the weight 0 is exact.

    Args:
        routing: what is to be run.
        spare_T: (T,) expert for rows with only empty slots; 0 by default.
    """
    ids, weights = routing.expert_ids_TK, routing.weights_TK
    if routing.slots == 0:
        ids = ids.new_full((routing.num_rows, 1), routing.num_experts)
        weights = weights.new_zeros((routing.num_rows, 1))
    used_T = ids.amin(1) if ids.numel() else ids.new_zeros(ids.shape[0])
    spare = torch.zeros_like(used_T) if spare_T is None else spare_T
    used_T = torch.where(used_T < routing.num_experts, used_T, spare)
    return torch.where(ids < routing.num_experts, ids, used_T[:, None]), weights


class Activated(Protocol):
    """A bank that says what happens between its projections."""

    @property
    def module(self) -> nn.Module:
        """What is called."""

    def activate(self, first_NH: Tensor) -> Tensor:
        """(N, 2F), or (N, F), to (N, F)."""


def plain_sum(bank: Activated, parameters: Parameters, x_TD: Tensor, weights_TK: Tensor, dispatch: Dispatch) -> Tensor:
    """Weighted sum of experts by plain differentiable operations, expert by expert, a norm behind each included.

    Args:
        bank: says what happens between the projections.
        parameters: what ``bank.parameters()`` gives, perhaps in another dtype.
        x_TD: (T, D) rows, of the dtype of the parameters.
        weights_TK: combine weights.
        dispatch: who goes where.

    Returns:
        (T, O) in the dtype of ``x_TD``.
    """
    sum_dtype = torch.float32 if x_TD.dtype in LOW_PRECISION else x_TD.dtype
    y_TO = x_TD.new_zeros((x_TD.shape[0], parameters.down_EOF.shape[1]), dtype=sum_dtype)
    done = []
    for expert, x in enumerate(x_TD.index_select(0, dispatch.row_N).split_with_sizes(dispatch.counts)):
        if not len(x):
            continue
        up, gate, down = (
            None if weight is None else (weight[expert], None if bias is None else bias[expert])
            for weight, bias in (
                (parameters.up_EFD, parameters.up_bias_EF),
                (parameters.gate_EFD, parameters.gate_bias_EF),
                (parameters.down_EOF, parameters.down_bias_EO),
            )
        )
        assert up is not None and down is not None
        first = F.linear(x, *up) if gate is None else torch.cat([F.linear(x, *gate), F.linear(x, *up)], 1)
        done.append(F.linear(bank.activate(first).to(x.dtype), *down))
    if not done:
        return y_TO.to(x_TD.dtype)
    y_NO = torch.cat(done)
    norm: Any = getattr(bank.module, "post_expert_norm", None)
    if norm is not None:
        y_NO = norm(y_NO)
    weights_N = weights_TK.reshape(-1).index_select(0, dispatch.slot_N)
    return y_TO.index_add(0, dispatch.row_N, (y_NO * weights_N[:, None]).to(sum_dtype)).to(x_TD.dtype)
