"""Banks of other shapes, told apart by what they hold: packed rows, projections apart, a module an expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.experts.fused import Parameters
from moesaic.models.adapters.weights import ForeignExperts, plain_sum
from moesaic.routing import Context, Routing
from moesaic.routing.dispatch import Dispatch

_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts")
_TWO = (("wi", "wo"), ("fc1", "fc2"), ("up_proj", "down_proj"))
_THREE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")


def bank_kind(module: nn.Module) -> type[ForeignExperts] | None:
    """The class that reads ``module`` as a bank of experts, or None where it is none."""
    own = dict(module.named_parameters(recurse=False))
    stacked = {key for key, value in own.items() if value.dim() == 3}
    if "down_proj" in stacked and stacked & {"gate_up_proj", "up_proj"}:
        return ForeignExperts
    for kind in (RowExperts, SplitExperts, ModuleExperts, EmbeddingExperts):
        if kind.fits(module):
            return kind
    return None


def bank_of(module: nn.Module, name: str) -> ForeignExperts:
    """``module`` as a bank.

    Raises:
        ValueError: no known structure.
    """
    kind = bank_kind(module)
    if kind is None:
        raise ValueError(f"{name} ({type(module).__name__}) is no bank of experts of a known structure")
    return kind(module, name)


class _OtherBank(ForeignExperts):
    """What banks without ``gate_up_proj`` share: views by name, computed by plain operations where they must be run."""

    joint = False
    transposed = False
    concatenated = True

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        views = self._views()
        self.has_gate = "gate" in views
        self.num_experts, self.width, self.dim = (int(n) for n in views["up"].shape)
        self.out_dim = int(views["down"].shape[1])
        gates = views.get("gate", views["up"])
        if views["down"].shape[2] != self.width or gates.shape != views["up"].shape:
            raise ValueError(f"{name}: projections { {k: tuple(v.shape) for k, v in views.items()} } do not fit")

    @property
    def identities(self) -> int:
        return 0

    def parameters(self) -> Parameters:
        views = self._views()
        gate, up_bias = views.get("gate"), views.get("up_bias")
        return Parameters(views["up"], views["down"], gate, up_bias, views.get("gate_bias"), views.get("down_bias"))

    def activate(self, first_NH: Tensor) -> Tensor:
        act: Any = self.activation
        if not self.has_gate:
            h_NF: Tensor = act(first_NH)
            return h_NF
        gate, up = first_NH.chunk(2, dim=1)
        h_NF = act(gate) * up
        return h_NF

    @property
    def activation(self) -> Any:
        holder = self._holder()
        return next((getattr(holder, name) for name in _ACTIVATIONS if hasattr(holder, name)), None)

    def _holder(self) -> nn.Module:
        return self.module

    def _rows(self, expert: int) -> dict[str, Tensor]:
        views = self._views()
        self._index([expert], views["up"])
        return {name: view[expert] for name, view in views.items()}

    def __call__(self, x_TD: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """The routed sum, (T, O), expert by expert."""
        dispatch = Dispatch.of(routing.expert_ids_TK, self.num_experts)
        return plain_sum(self, self.parameters(), x_TD, routing.weights_TK, dispatch)


class RowExperts(_OtherBank):
    """One matrix for all experts' rows: ``w1``, ``v1`` and ``w2`` (E * F, D) are gates, ups and downs."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether ``module`` is such a bank."""
        return _glu(module) is not None and _count(module) is not None

    def _holder(self) -> nn.Module:
        holder = _glu(self.module)
        assert holder is not None
        return holder

    def _views(self) -> dict[str, Tensor]:
        holder: Any = self._holder()
        experts = _count(self.module)
        gate, up, down = (tensor.view(experts, -1, tensor.shape[1]) for tensor in (holder.w1, holder.v1, holder.w2))
        return {"gate": gate, "up": up, "down": down.transpose(1, 2)}


class SplitExperts(_OtherBank):
    """A block that holds two stacks, ``input_linear.weight`` (E, 2F, D) and ``output_linear.weight`` (E, D, F)."""

    is_block = True

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether ``module`` is such a block; one without a function between the two is no feed-forward bank."""
        first, last = getattr(module, "input_linear", None), getattr(module, "output_linear", None)
        stacks = [getattr(part, "weight", None) for part in (first, last)]
        if not all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks):
            return False
        return any(callable(getattr(module, name, None)) for name in _ACTIVATIONS)

    def _views(self) -> dict[str, Tensor]:
        module: Any = self.module
        first, down = module.input_linear.weight, module.output_linear.weight
        if first.shape[1] != 2 * down.shape[2]:
            return {"up": first, "down": down}
        return {
            "gate": first.narrow(1, 0, down.shape[2]),
            "up": first.narrow(1, down.shape[2], down.shape[2]),
            "down": down,
        }


class ModuleExperts(_OtherBank):
    """A module an expert, each with two or three linear layers, in a list or dictionary called ``experts``."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether ``module`` is such a list."""
        children = list(module.children())
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(children) < 2:
            return False
        return len({type(child) for child in children}) == 1 and _linears(children[0]) is not None

    def _holder(self) -> nn.Module:
        return next(iter(self.module.children()))

    def weights(self, ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """See :meth:`ForeignExperts.weights`; always copies here, with gradient."""
        if ids is not None:
            self._index(ids, next(self.module.parameters()))
        rows = [_expert_rows(child) for child in self.module.children()]
        chosen = rows if ids is None else [rows[i] for i in ids]
        return {name: torch.stack([row[name] for row in chosen]) for name in rows[0]}

    def _views(self) -> dict[str, Tensor]:
        return self.weights()

    def _rows(self, expert: int) -> dict[str, Tensor]:
        self._index([expert], next(self.module.parameters()))
        return _expert_rows(list(self.module.children())[expert])


class EmbeddingExperts(_OtherBank):
    """Experts of one hidden unit, kept as two embeddings (E, D) in a block that holds all parts."""

    is_block = True

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether ``module`` is such a block."""
        parts = [getattr(module, name, None) for name in ("down_embed", "up_embed")]
        return all(isinstance(part, nn.Embedding) for part in parts) and hasattr(module, "router_gate")

    def _views(self) -> dict[str, Tensor]:
        module: Any = self.module
        return {"up": module.down_embed.weight[:, None, :], "down": module.up_embed.weight[:, :, None]}


def _glu(module: nn.Module) -> nn.Module | None:
    """The part of ``module`` that holds w1, v1 and w2, if any: itself or a child."""
    for part in (module, *module.children()):
        tensors = [getattr(part, name, None) for name in ("w1", "v1", "w2")]
        if all(isinstance(t, nn.Parameter) and t.dim() == 2 for t in tensors) and len({t.shape for t in tensors}) == 1:  # type: ignore[union-attr]
            return part
    return None


def _count(module: nn.Module) -> int | None:
    counts = [vars(module).get(name) for name in _COUNTS]
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def _linears(module: nn.Module) -> dict[str, nn.Linear] | None:
    """The linear layers of one expert by what they do; None where they are not the two or three that are known."""
    own = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    for names, roles in ((_THREE, ("gate", "up", "down")), (_TWO, ("up", "down"))):
        for chosen in names:
            if set(own) == set(chosen):
                return {role: own[name] for role, name in zip(roles, chosen, strict=True)}
    return None


def _expert_rows(module: nn.Module) -> dict[str, Tensor]:
    linears = _linears(module)
    assert linears is not None
    rows: dict[str, Tensor] = {role: linear.weight for role, linear in linears.items()}
    rows.update({f"{role}_bias": linear.bias for role, linear in linears.items() if linear.bias is not None})
    return rows
