"""Foreign banks of experts that are not one stacked pair of tensors in the experts' module itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.experts.fused import Parameters
from moesaic.models.adapters.bank import ForeignBank
from moesaic.models.adapters.weights import ForeignExperts, fill_empty
from moesaic.routing import Routing


class FlatExperts(ForeignBank):
    """Gate ``w1``, up ``v1`` and down ``w2`` of all experts under one another: (E * F, D) each.

    Args:
        module: takes (x, ids, weights).
        holder: the module with the three matrices.
        name: path of ``module``.
    """

    def __init__(self, module: nn.Module, holder: nn.Module, name: str) -> None:
        experts, first = getattr(module, "num_experts", None), getattr(holder, "w1", None)
        assert isinstance(experts, int) and isinstance(first, Tensor)
        rows, dim = first.shape
        super().__init__(module, name, experts, dim, dim, rows // experts)
        self.holder = holder

    def views(self) -> dict[str, Tensor]:
        """See :class:`ForeignBank`."""
        stacked: dict[str, Tensor] = {
            part: getattr(self.holder, name).view(self.num_experts, self.width, self.dim)
            for part, name in (("gate", "w1"), ("up", "v1"), ("down", "w2"))
        }
        return {**stacked, "down": stacked["down"].transpose(1, 2)}

    def parameters(self) -> Parameters:
        """The bank's tensors as the fused computation takes them, views with gradient."""
        views = self.views()
        return Parameters(views["up"], views["down"], gate_EFD=views["gate"])

    def activate(self, first_NH: Tensor) -> Tensor:
        """What the bank does between its projections: (N, 2F), gate first, to (N, F)."""
        gate, up = first_NH.chunk(2, dim=1)
        h_NF: Tensor = self.activation(gate) * up
        return h_NF

    @property
    def activation(self) -> Any:
        """The module's nonlinearity."""
        return getattr(self.holder, "activation_fn", None)

    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """See :class:`ForeignBank`."""
        return [(name, self.holder, self.width) for name in ("w1", "v1", "w2")]

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`."""
        ids_TK, weights_TK = fill_empty(routing)
        y: Tensor = self.module(x_TD, ids_TK, weights_TK.to(x_TD.dtype))
        return y.reshape(x_TD.shape[0], -1)


def flat_holder(module: nn.Module) -> nn.Module | None:
    """The child of ``module`` with the three matrices of :class:`FlatExperts`, or None."""
    for child in module.children():
        own = {key for key, value in child.named_parameters(recurse=False) if value.dim() == 2}
        if own >= {"w1", "v1", "w2"}:
            return child
    return None


def called_bank(module: nn.Module, name: str) -> ForeignExperts | FlatExperts:
    """The bank whose module is called with (x, ids, weights)."""
    holder = flat_holder(module)
    return ForeignExperts(module, name) if holder is None else FlatExperts(module, holder, name)


class ScaledInputExperts(ForeignExperts):
    """A stacked bank whose experts take the row times its weight, so that the nonlinearity sees the weight.

    Its module takes the rows of all experts under one another, (E * T, D).
    """

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`."""
        scaled_ETD = x_TD * routing.weights_TE.T[:, :, None].to(x_TD.dtype)
        y: Tensor = self.module(scaled_ETD.reshape(-1, x_TD.shape[1]))
        return y.view(self.num_experts, x_TD.shape[0], -1).sum(0)


class PairedExperts(ForeignBank):
    """Two modules in the block, ``input_linear`` and ``output_linear``, each with a stacked ``weight``.

    Args:
        module: the block that holds both.
        name: its path.
        gated: whether the first gives gate and up (in this order).
    """

    def __init__(self, module: nn.Module, name: str, gated: bool) -> None:
        down = module.output_linear.weight  # type: ignore[union-attr]
        assert isinstance(down, Tensor)
        super().__init__(module, name, int(down.shape[0]), int(down.shape[1]), int(down.shape[1]), int(down.shape[2]))
        self.has_gate = gated

    def views(self) -> dict[str, Tensor]:
        """See :class:`ForeignBank`; experts of an attention have ``up`` (to queries) and ``down`` (from heads)."""
        first: Tensor = self.module.input_linear.weight  # type: ignore[union-attr, assignment]
        down: Tensor = self.module.output_linear.weight  # type: ignore[union-attr, assignment]
        if not self.has_gate:
            return {"up": first, "down": down}
        return {"gate": first[:, : self.width], "up": first[:, self.width :], "down": down}

    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """See :class:`ForeignBank`."""
        return [("weight", self.module.input_linear, 1), ("weight", self.module.output_linear, 1)]  # type: ignore[list-item]

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`.

        Raises:
            ValueError: experts of an attention, which mean nothing without it.
        """
        if not self.has_gate:
            raise ValueError(f"{self.name} holds experts of an attention: they cannot be run outside it")
        parts, act, dispatch = self.views(), self.module.activation, routing.dispatch
        y_TO = x_TD.new_zeros((x_TD.shape[0], self.out_dim))
        for expert, (x, slot_N, row_N) in enumerate(
            zip(
                x_TD[dispatch.row_N].split_with_sizes(dispatch.counts),
                dispatch.slot_N.split_with_sizes(dispatch.counts),
                dispatch.row_N.split_with_sizes(dispatch.counts),
                strict=True,
            )
        ):
            h = act(x @ parts["gate"][expert].T) * (x @ parts["up"][expert].T)  # type: ignore[operator]
            weights_N = routing.weights_TK.reshape(-1)[slot_N].to(x_TD.dtype)
            y_TO = y_TO.index_add(0, row_N, (h @ parts["down"][expert].T) * weights_N[:, None])
        return y_TO


class ModuleExperts(ForeignBank):
    """A dictionary of modules ``expert_0``, ``expert_1`` ..., each with two linear layers.

    Args:
        module: the dictionary; it takes (x, mask (T, K, E), weights (T, K)), or ids (T, K) for the mask.
        name: its path.
        first, second: names of the two layers.
        by_mask: whether the choice is a mask.
    """

    def __init__(self, module: nn.ModuleDict, name: str, first: str, second: str, by_mask: bool) -> None:
        one: Any = module["expert_0"]
        up, down = getattr(one, first), getattr(one, second)
        super().__init__(module, name, len(_experts(module)), up.in_features, down.out_features, up.out_features)
        self.layers = {"up": first, "down": second}
        self.by_mask = by_mask
        self.has_gate = False
        self.biased = up.bias is not None

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """See :class:`ForeignBank`; stacked copies with gradient, also of all experts."""
        chosen = range(self.num_experts) if ids is None else ids
        self._index(list(chosen), next(self.module.parameters()))
        rows = [self._rows(expert) for expert in chosen]
        return {name: torch.stack([row[name] for row in rows]) for name in (rows[0] if rows else {})}

    def views(self) -> dict[str, Tensor]:
        """See :class:`ForeignBank`."""
        return self.weights()

    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """See :class:`ForeignBank`; none: whole modules move."""
        return []

    def rearrange(self, sources: Sequence[int], mixes: Tensor | None = None) -> None:
        """See :class:`ForeignBank`."""
        assert isinstance(self.module, nn.ModuleDict)
        old = [self.module[f"expert_{i}"] for i in range(self.num_experts)]
        fresh: list[nn.Module] = []
        for source in sources:
            taken = any(part is old[source] for part in fresh)
            fresh.append(copy.deepcopy(old[source]) if taken else old[source])
        means = {} if mixes is None else self._means(mixes)
        for key in _experts(self.module):
            del self.module[key]
        for place, part in enumerate(fresh):
            self.module[f"expert_{place}"] = part
        for place, values in means.items():
            for name, value in values.items():
                self._rows(place)[name].copy_(value)

    def _means(self, mixes: Tensor) -> dict[int, dict[str, Tensor]]:
        all_parts = self.weights()
        places = (mixes > 0).sum(1).gt(1).nonzero().flatten().tolist()
        return {
            place: {
                name: torch.einsum("e,e...->...", mixes[place].to(value.device), value.double()).to(value.dtype)
                for name, value in all_parts.items()
            }
            for place in places
        }

    def _rows(self, expert: int) -> dict[str, Tensor]:
        self._index([expert], next(self.module.parameters()))
        assert isinstance(self.module, nn.ModuleDict)
        found: dict[str, Tensor] = {}
        for part, layer in self.layers.items():
            linear: Any = getattr(self.module[f"expert_{expert}"], layer)
            found[part] = linear.weight
            if self.biased:
                found[f"{part}_bias"] = linear.bias
        return found

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`."""
        weights = routing.weights_TK.to(x_TD.dtype)
        if not self.by_mask:
            ids, weights = fill_empty(routing)
            plain: Tensor = self.module(x_TD, ids, weights.to(x_TD.dtype))
            return plain
        mask_TKE = nn.functional.one_hot(routing.expert_ids_TK, self.num_experts + 1)[..., : self.num_experts]
        y: Tensor = self.module(x_TD, mask_TKE, weights)
        return y


def _experts(module: nn.ModuleDict) -> list[str]:
    return [key for key in module if key.startswith("expert_")]
