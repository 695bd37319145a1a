"""Finding MoE layers of foreign models by structure, and refusing what looks like one and is not known."""

from __future__ import annotations

import re

from torch import nn

from moesaic.layers import BareMoE, MoE
from moesaic.models.adapters.shell import Shell
from moesaic.models.adapters.structures import STRUCTURES

_MOE_CLASS = re.compile(
    r"(MoE|Moe|MoA|Experts|SparseMLP|SparseMoeBlock|MoeBlock|NaiveMoe|TopKRouter|Top1Router|Top2Router)$"
)


def find_shells(model: nn.Module) -> list[Shell]:
    """Every MoE layer of ``model`` of a known structure, in module order.

    Args:
        model: any module; layers of ours (:class:`~moesaic.layers.MoE`) are left alone.

    Raises:
        ValueError: a part that looks like an MoE layer and has no known structure, naming it and what is missing.
    """
    modules = dict(model.named_modules())
    ours = [name for name, module in modules.items() if isinstance(module, (BareMoE, MoE))]
    shells = []
    for name in modules:
        if not _in(name, ours):
            matches = (match(name, modules) for match in STRUCTURES)
            shells += [shell for shell in matches if shell is not None][:1]
    _refuse_unknown(modules, shells, ours)
    return shells


def _refuse_unknown(modules: dict[str, nn.Module], shells: list[Shell], ours: list[str]) -> None:
    covered = {id(part) for shell in shells for part in (shell.router, shell.experts.module, shell.block)}
    blocks = [shell.name for shell in shells]
    for name, module in modules.items():
        if id(module) in covered or _in(name, ours) or _in(name, [b for b in blocks if b]):
            continue
        if any(_in(shell.experts.name, [name]) for shell in shells):
            continue  # a module around a covered layer
        looks = _MOE_CLASS.search(type(module).__name__) or _last(name) in ("experts", "router")
        if looks and any(True for _ in module.parameters()):
            raise ValueError(
                f"{name} ({type(module).__name__}) looks like a part of an MoE layer, but its structure is not"
                f" supported: {_missing(module)}"
            )


def _missing(module: nn.Module) -> str:
    parts = [name for name, _ in module.named_children()] or [name for name, _ in module.named_parameters()]
    return (
        "no module under it holds stacked parameters gate_up_proj (or up_proj) and down_proj of three axes with a"
        f" router beside it that returns (logits, weights, ids); its parts are {parts}"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in(name: str, roots: list[str]) -> bool:
    """Whether ``name`` is one of ``roots`` or lies inside one."""
    return any(name == root or name.startswith(f"{root}.") or root == "" for root in roots)
