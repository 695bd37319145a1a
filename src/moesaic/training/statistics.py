"""Bounded records of a run's routing, and which experts' weights have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.layers import MoE
from moesaic.models.parameter_roles import model_parameter_specs
from moesaic.routing import Routing

_MOST_ROWS = 512
_SAMPLES = 256


@torch.no_grad()
def routing_summary(routings: Sequence[Routing]) -> dict[str, float]:
    """A few numbers over all layers of one forward.

    Args:
        routings: one per MoE layer.

    Returns:
        ``max_share`` (largest share of a layer's assignments that one expert gets), ``max_over_mean`` (the same in
        units of the mean load), ``entropy_mean`` and ``entropy_min`` over layers in nats where routers form logits, and
        ``active_fraction`` (mean share of the experts that a token uses). Empty for no routings.
    """
    shares, over_mean, entropies, active = [], [], [], []
    for routing in routings:
        total = int(routing.load_E.sum())
        rows = int(routing.real_T.sum())
        if total == 0 or rows == 0:
            continue
        share = int(routing.load_E.max()) / total
        shares.append(share)
        over_mean.append(share * routing.num_experts)
        active.append(total / (rows * routing.num_experts))
        if routing.logits_TE is not None:
            entropies.append(float(routing.entropy))
    summary: dict[str, float] = {}
    if shares:
        summary |= {"max_share": max(shares), "max_over_mean": max(over_mean)}
        summary["active_fraction"] = sum(active) / len(active)
    if entropies:
        summary |= {"entropy_mean": sum(entropies) / len(entropies), "entropy_min": min(entropies)}
    return summary


class LoadTable:
    """Loads of every layer and expert at logged steps: step by layer by expert, at most 512 steps.

    When it is full, every other step is dropped, so the table covers the whole run at falling resolution.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.layers: list[list[Tensor]] = []

    def add(self, step: int, routings: Sequence[Routing]) -> None:
        """Record the loads of one forward."""
        if not routings:
            return
        if len(self.layers) != len(routings):
            self.steps, self.layers = [], [[] for _ in routings]
        self.steps.append(step)
        for rows, routing in zip(self.layers, routings):
            rows.append(routing.load_E.to("cpu", torch.int64))
        if len(self.steps) > _MOST_ROWS:
            self.steps = self.steps[::2]
            self.layers = [rows[::2] for rows in self.layers]

    def tensors(self) -> dict[str, Tensor]:
        """``steps`` (N,) and, for each layer, ``load.INDEX`` (N, E), all int64."""
        if not self.steps:
            return {}
        tables = {f"load.{index:03d}": torch.stack(rows) for index, rows in enumerate(self.layers)}
        return {"steps": torch.tensor(self.steps), **tables}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`tensors` gave."""
        if "steps" in tensors:
            self.steps = tensors["steps"].tolist()
            self.layers = [list(tensors[name].unbind(0)) for name in sorted(tensors) if name.startswith("load.")]

    def totals(self) -> list[Tensor]:
        """(E,) loads of each layer summed over the recorded steps."""
        return [torch.stack(rows).sum(0) for rows in self.layers]


@dataclass(frozen=True)
class UnmovedExpert:
    """An expert whose weights are what they were at the start, but for weight decay.

    Attributes:
        bank: module path of its bank.
        expert: its index.
        tokens: tokens it received at logged steps; None where the model gives no routings.
        trainable: False where its weights were frozen on purpose.
    """

    bank: str
    expert: int
    tokens: int | None
    trainable: bool


class ExpertMovement:
    """Tells experts that learned from those whose weights never moved.

    A sample of up to 256 entries of each expert's matrices is kept from the start. An expert has moved when in one of
    its matrices the sample is no longer a multiple of what it was (weight decay alone only scales it).

    Args:
        model: banks are found by the axes of their parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._matrices = {
            name: parameter
            for name, parameter, spec in model_parameter_specs(model)
            if spec.axes[:1] == ("expert",) and spec.role in ("expert-in", "expert-out")
        }
        self.start = {name: _sample(parameter) for name, parameter in self._matrices.items()}
        self._banks = [
            f"{name}.experts" if name else "experts" for name, m in model.named_modules() if isinstance(m, MoE)
        ]

    @property
    def num_experts(self) -> int:
        """Experts that are watched, over all banks."""
        sizes = {name.rpartition(".")[0]: int(p.shape[0]) for name, p in self._matrices.items()}
        return sum(sizes.values())

    def unmoved(self, steps: int, totals: Sequence[Tensor] = ()) -> list[UnmovedExpert]:
        """Experts that never moved.

        Args:
            steps: taken so far, which bounds the rounding that decay may have left.
            totals: (E,) loads per MoE layer, to say whether an unmoved expert received tokens.
        """
        tolerance = 1e-7 * (1 + max(steps, 0) ** 0.5)
        moved: dict[str, Tensor] = {}
        trainable: dict[str, bool] = {}
        for name, parameter in self._matrices.items():
            bank = name.rpartition(".")[0]
            here_E = _turned(self.start[name], _sample(parameter)) > tolerance
            moved[bank] = moved[bank] | here_E if bank in moved else here_E
            trainable[bank] = trainable.get(bank, False) or parameter.requires_grad
        tokens = dict(zip(self._banks, totals)) if len(totals) == len(self._banks) else {}
        return [
            UnmovedExpert(bank, expert, int(tokens[bank][expert]) if bank in tokens else None, trainable[bank])
            for bank, moved_E in moved.items()
            for expert in torch.nonzero(~moved_E).flatten().tolist()
        ]


def _sample(parameter: Tensor) -> Tensor:
    """(E, n) entries spread over each expert's matrix, float32 on the CPU."""
    flat = parameter.detach().reshape(parameter.shape[0], -1)
    index = torch.linspace(0, flat.shape[1] - 1, min(_SAMPLES, flat.shape[1])).long().to(flat.device)
    return flat[:, index].to("cpu", torch.float32)


def _turned(before_ES: Tensor, after_ES: Tensor) -> Tensor:
    """(E,) relative distance of each row from the nearest multiple of what it was; from itself where that was zero."""
    before, after = before_ES.double(), after_ES.double()
    size = before.square().sum(1)
    scale = (before * after).sum(1) / size.clamp(min=torch.finfo(torch.float64).tiny)
    distance = (after - scale[:, None] * before).norm(dim=1)
    relative: Tensor = distance / after.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return relative
