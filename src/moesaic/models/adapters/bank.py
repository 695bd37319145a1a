"""Contract 2 over a foreign bank of experts, whatever its layout: read, written and run in one convention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moesaic.routing import Context, Routing


class ForeignBank(ABC):
    """A bank of transformers: its modules stay what they are, this reads, writes and runs them.

    Args:
        module: the module that is called with the choice.
        name: its path in the model, for messages.
        num_experts: E.
        dim: D.
        out_dim: O.
        width: hidden units of an expert.
    """

    has_gate = True
    identities = 0
    """Experts behind the others whose rows the bank itself stores and which return their input (ids E, E + 1, ...)."""

    def __init__(self, module: nn.Module, name: str, num_experts: int, dim: int, out_dim: int, width: int) -> None:
        self.module = module
        self.name = name
        self.num_experts = num_experts
        self.dim = dim
        self.out_dim = out_dim
        self.width = width

    @abstractmethod
    def views(self) -> dict[str, Tensor]:
        """All weights under the names and shapes of :meth:`weights`, with gradient."""

    @abstractmethod
    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The routed sum (T, O) as the bank computes it; ``routing`` is over its own E experts."""

    @abstractmethod
    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """Every tensor with rows for the experts: its name, the module that holds it, and its rows for each expert."""

    def rearrange(self, sources: Sequence[int], mixes: Tensor | None = None) -> None:
        """Whatever else must move when the old expert in each new place is ``sources``; nothing for stacked tensors.

        Args:
            sources: old expert in each new place.
            mixes: (new, old) shares where an expert becomes a mean, or None.
        """
        return None

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Weights of the experts ``ids`` (all by default).

        Returns:
            ``gate`` and ``up`` (n, F, D) (no ``gate`` where the experts have none), ``down`` (n, D, F), and where the
            bank has them ``gate_bias``, ``up_bias`` (n, F) and ``down_bias`` (n, D). Views of the parameters for all
            experts, copies for some (always copies where every expert is a module of its own); with gradient.

        Raises:
            IndexError: an id outside 0..E-1.
        """
        return {name: view if ids is None else view[self._index(ids, view)] for name, view in self.views().items()}

    @torch.no_grad()
    def write(self, expert: int, values: Mapping[str, Tensor]) -> None:
        """Replace weights of one expert, under the names and shapes of :meth:`weights` without the first axis.

        Raises:
            ValueError: a name that this bank has not, or another shape.
            IndexError: an id outside 0..E-1.
        """
        rows = self._rows(expert)
        for name, value in values.items():
            if name not in rows:
                raise ValueError(f"{self.name} has no {name!r}; it has {sorted(rows)}")
            row = rows[name]
            if value.shape != row.shape:
                raise ValueError(
                    f"{name} of an expert of {self.name} has shape {tuple(row.shape)}, got {tuple(value.shape)}"
                )
            row.copy_(value)

    def outputs(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Unweighted outputs slot by slot, (T, K, O); exactly zero in empty slots."""
        per_slot = []
        for slot in range(routing.slots):
            ids = routing.expert_ids_TK[:, slot]
            one = Routing(ids[:, None], (ids < routing.num_experts).to(x_TD.dtype)[:, None], routing.num_experts)
            per_slot.append(self(x_TD, one, context))
        if not per_slot:
            return x_TD.new_zeros((x_TD.shape[0], 0, self.out_dim))
        return torch.stack(per_slot, 1)

    def __call__(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """The routed sum as the bank itself computes it, (T, O); the block's factor, if any, is part of the weights.

        Ids beyond the bank's experts (where ``routing`` has more) are those of experts that return their input.
        """
        ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
        beyond_TK = ids_TK >= self.num_experts
        own = Routing(
            ids_TK.masked_fill(beyond_TK, self.num_experts), weights_TK.masked_fill(beyond_TK, 0.0), self.num_experts
        )
        y_TO = self.run(x_TD, own)
        y_TO = torch.where((own.active_T == 0)[:, None], torch.zeros_like(y_TO), y_TO)
        if routing.num_experts > self.num_experts:
            y_TO = y_TO + x_TD * (weights_TK * beyond_TK).sum(1, keepdim=True).to(x_TD.dtype)
        return y_TO

    def _rows(self, expert: int) -> dict[str, Tensor]:
        """What :meth:`write` writes to."""
        views = self.views()
        self._index([expert], next(iter(views.values())))
        return {name: view[expert] for name, view in views.items()}

    def _index(self, ids: Sequence[int], like: Tensor) -> Tensor:
        bad = [i for i in ids if not 0 <= i < self.num_experts]
        if bad:
            raise IndexError(f"{self.name} has experts 0..{self.num_experts - 1}, got {bad[0]}")
        return torch.tensor(list(ids), dtype=torch.int64, device=like.device)
