"""Finding MoE layers of foreign models by structure: a stacked bank of experts and the router beside it."""

from __future__ import annotations

import re

from torch import nn

from moesaic.layers import MoE
from moesaic.models.adapters.probe import probe
from moesaic.models.adapters.shell import Shell
from moesaic.models.adapters.weights import ForeignExperts

_ROUTER_NAMES = ("gate", "router")
_ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
_MOE_CLASS = re.compile(
    r"(MoE|Moe|MoA|Experts|SparseMLP|SparseMoeBlock|MoeBlock|NaiveMoe|TopKRouter|Top1Router|Top2Router)$"
)
_CLIMB = 3  # wrappers (adapters) may stand between a bank and its block


def find_shells(model: nn.Module) -> list[Shell]:
    """Every standard-shell MoE layer of ``model``, in module order.

    Args:
        model: any module; layers of ours (:class:`~moesaic.layers.MoE`) are left alone.

    Raises:
        ValueError: a part that looks like an MoE layer and has no known structure, naming it and what is missing.
    """
    modules = dict(model.named_modules())
    ours = [name for name, module in modules.items() if isinstance(module, MoE)]
    shells = [
        _shell(name, modules) for name, module in modules.items() if _is_bank(name, module) and not _in(name, ours)
    ]
    _refuse_unknown(modules, shells, ours)
    return shells


def _is_bank(name: str, module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    stacked = {key for key, value in own.items() if value.dim() == 3}
    return "down_proj" in stacked and bool(stacked & {"gate_up_proj", "up_proj"}) and "shared" not in _last(name)


def _shell(name: str, modules: dict[str, nn.Module]) -> Shell:
    bank = modules[name]
    block_name = _parent(name)
    for _ in range(_CLIMB):
        block = modules[block_name]
        router = _router_of(block)
        if router is not None or block_name == "":
            break
        block_name = _parent(block_name)
    if router is None:
        raise ValueError(
            f"{name} ({type(bank).__name__}) holds stacked experts, but no router was found beside it: looked for"
            f" {' or '.join(_ROUTER_NAMES)} or a class named *Router in {_parent(name) or 'the model'}"
        )
    found = probe(router, block)
    if found.outputs and (found.outputs < 3 or not found.top_k):
        raise ValueError(f"{block_name} ({type(block).__name__}): this MoE structure is not supported: {found.reason}")
    beside = any(re.search(r"attn|attention|^mlp$|^mixer$", child) for child, _ in block.named_children())
    return Shell(block_name, block, router, ForeignExperts(bank, name), found, bank if beside else block)


def _router_of(block: nn.Module) -> nn.Module | None:
    children = dict(block.named_children())
    for name in _ROUTER_NAMES:
        if name in children:
            return children[name]
    named = [child for child in children.values() if _ROUTER_CLASS.search(type(child).__name__)]
    return named[0] if len(named) == 1 else None


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


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in(name: str, roots: list[str]) -> bool:
    """Whether ``name`` is one of ``roots`` or lies inside one."""
    return any(name == root or name.startswith(f"{root}.") or root == "" for root in roots)
