"""The structures of MoE layers that are known: each is recognised by its modules and tensors, never by a class name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from moesaic.models.adapters.banks import FlatExperts, ModuleExperts, PairedExperts, ScaledInputExperts, flat_holder
from moesaic.models.adapters.exchange import DenseScores, RouterOutput, SortedRows
from moesaic.models.adapters.exchange_bank import BlockSelects, OneHotSlots
from moesaic.models.adapters.probe import probe
from moesaic.models.adapters.product_keys import ProductKeys, RankOneExperts
from moesaic.models.adapters.shell import Shell
from moesaic.models.adapters.two_masks import TwoMasks
from moesaic.models.adapters.weights import ForeignExperts

Modules = Mapping[str, nn.Module]

_ROUTER_NAMES = ("gate", "router")
_ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
_CLIMB = 3  # wrappers (adapters) may stand between a bank and its block


def stacked(name: str, modules: Modules) -> Shell | None:
    """A bank with ``down_proj`` and ``gate_up_proj`` (or ``up_proj``) of three axes, beside a router.

    The router returns (logits, weights, ids, ...), or (scores, logits) with the score 0 for what is not chosen.

    Raises:
        ValueError: no router beside it, or one that returns something else.
    """
    bank = modules[name]
    own = _own_tensors(bank, 3)
    if "down_proj" not in own or not own & {"gate_up_proj", "up_proj"} or "shared" in _last(name):
        return None
    block_name, router = _block_of(name, modules)
    block = modules[block_name]
    if router is None:
        raise ValueError(
            f"{name} ({type(bank).__name__}) holds stacked experts, but no router was found beside it: looked for"
            f" {' or '.join(_ROUTER_NAMES)} or a class named *Router in {_parent(name) or 'the model'}"
        )
    found = probe(router, block, RouterOutput())
    if found.outputs == 2 and hasattr(router, "top_k"):
        dense = probe(router, block, DenseScores())
        if dense.rule is not None:
            return Shell(block_name, block, router, ScaledInputExperts(bank, name), dense, block, DenseScores())
    if found.outputs and (found.outputs < 3 or not found.top_k):
        raise ValueError(f"{block_name} ({type(block).__name__}): this MoE structure is not supported: {found.reason}")
    beside = any(re.search(r"attn|attention|^mlp$|^mixer$", child) for child, _ in block.named_children())
    return Shell(block_name, block, router, ForeignExperts(bank, name), found, bank if beside else block)


def flat(name: str, modules: Modules) -> Shell | None:
    """Experts whose child holds ``w1``, ``v1``, ``w2`` (E * F, D), in a block that chooses from a router's logits."""
    bank = modules[name]
    holder = flat_holder(bank)
    if holder is None:
        return None
    block_name, router = _block_of(name, modules)
    block = modules[block_name]
    if router is None or not hasattr(block, "route_tokens_to_experts"):
        return None
    exchange = BlockSelects()
    bank_found = FlatExperts(bank, holder, name)
    return Shell(block_name, block, router, bank_found, probe(router, block, exchange), block, exchange)


def paired(name: str, modules: Modules) -> Shell | None:
    """A block with ``input_linear``, ``output_linear`` (a stacked ``weight`` each) and a router that sorts rows.

    In an attention the block holds the experts of its queries and outputs, and has no forward of its own.
    """
    block = modules[name]
    parts = [getattr(block, part, None) for part in ("input_linear", "output_linear", "router")]
    if not all(isinstance(part, nn.Module) for part in parts):
        return None
    shapes = [tuple(w.shape) for part in parts[:2] if isinstance(w := getattr(part, "weight", None), Tensor)]
    if [len(shape) for shape in shapes] != [3, 3]:
        return None
    (_, first, _), (_, _, width) = shapes
    router = block.router
    assert isinstance(router, nn.Module)
    gated = first == 2 * width and hasattr(block, "activation")
    exchange = SortedRows(None if gated else int(block.top_k))  # type: ignore[arg-type]
    site = block if gated else modules[_parent(name)]
    return Shell(name, block, router, PairedExperts(block, name, gated), probe(router, block, exchange), site, exchange)


def modular(name: str, modules: Modules) -> Shell | None:
    """A dictionary ``expert_0``, ``expert_1`` ... of modules with two linear layers, beside a router of masks."""
    bank = modules[name]
    if not isinstance(bank, nn.ModuleDict) or "expert_0" not in bank:
        return None
    block_name, router = _block_of(name, modules)
    linear = [part for part, child in bank["expert_0"].named_children() if isinstance(child, nn.Linear)]
    if router is None or len(linear) != 2:
        return None
    block = modules[block_name]
    exchange = TwoMasks() if hasattr(router, "route_tokens") else OneHotSlots()
    experts = ModuleExperts(bank, name, linear[0], linear[1], by_mask=isinstance(exchange, OneHotSlots))
    return Shell(block_name, block, router, experts, probe(router, block, exchange), block, exchange)


def product_keys(name: str, modules: Modules) -> Shell | None:
    """A block with a ``router_gate`` over two halves of keys and rank-one experts in two embeddings."""
    block = modules[name]
    gate = getattr(block, "router_gate", None)
    pair = [getattr(block, part, None) for part in ("down_embed", "up_embed")]
    if not isinstance(gate, nn.Linear) or not all(isinstance(part, nn.Embedding) for part in pair):
        return None
    exchange = ProductKeys()
    return Shell(name, block, gate, RankOneExperts(block, name), probe(gate, block, exchange), block, exchange)


STRUCTURES: tuple[Callable[[str, Modules], Shell | None], ...] = (stacked, flat, paired, modular, product_keys)


def _block_of(name: str, modules: Modules) -> tuple[str, nn.Module | None]:
    """Path of the module around ``name`` that has a router, and the router; None where there is none."""
    block_name = _parent(name)
    router = _router_of(modules[block_name])
    for _ in range(_CLIMB - 1):
        if router is not None or block_name == "":
            break
        block_name = _parent(block_name)
        router = _router_of(modules[block_name])
    return block_name, router


def _router_of(block: nn.Module) -> nn.Module | None:
    children = dict(block.named_children())
    for name in _ROUTER_NAMES:
        if name in children:
            return children[name]
    named = [child for child in children.values() if _ROUTER_CLASS.search(type(child).__name__)]
    return named[0] if len(named) == 1 else None


def _own_tensors(module: nn.Module, axes: int) -> set[str]:
    return {key for key, value in module.named_parameters(recurse=False) if value.dim() == axes}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
