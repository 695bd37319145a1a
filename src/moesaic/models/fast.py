"""Our computation of experts inside models of transformers, switched on and off."""

from __future__ import annotations

import copy
import inspect
import logging
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.adapters.bank import ForeignBank
from moesaic.models.adapters.banks import FlatExperts
from moesaic.models.adapters.weights import ForeignExperts
from moesaic.models.fast_forward import fast_experts_forward
from moesaic.models.handle import MoELayer, moe_layers

NAME = "moesaic"  # under which transformers' experts interface knows ours

_log = logging.getLogger("moesaic.models.fast")


class FastExperts:
    """What :func:`use_fast_experts` did. As a context manager it undoes it at the end of the block.

    Attributes:
        covered: layer name -> how it runs now.
        refused: layer name -> why it runs as before.
    """

    def __init__(self) -> None:
        self.covered: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._configs: list[tuple[Any, str | None]] = []
        self._modules: list[nn.Module] = []

    def undo(self) -> None:
        """Give every layer the forward that it had; what somebody else has set since then stays."""
        for config, before in self._configs:
            if config._experts_implementation_internal == NAME:
                config._experts_implementation_internal = before
        for module in self._modules:
            if getattr(vars(module).get("forward"), "__func__", None) is fast_experts_forward:
                del module.forward
            vars(module).pop("__deepcopy__", None)
        self._configs.clear()
        self._modules.clear()

    def __enter__(self) -> FastExperts:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        total = len(self.covered) + len(self.refused)
        lines = [f"fast experts in {len(self.covered)} of {total} MoE layers"]
        lines += [f"  {len(names)} {how}: {_some(names)}" for how, names in _grouped(self.covered).items()]
        lines += [f"  {len(names)} as before, {why}: {_some(names)}" for why, names in _grouped(self.refused).items()]
        return "\n".join(lines)


class Switched(str):
    """The name of ours in a configuration; a copy or a pickle of the configuration holds what stood there before."""

    before: str | None

    def __new__(cls, before: str | None) -> Switched:
        """A string equal to the name of ours."""
        made = super().__new__(cls, NAME)
        made.before = before
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        return self.before

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.before,)


def _same(value: str | None) -> str | None:
    return value


def _copy_as_it_was(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a bank whose forward was replaced: without the replacement."""
    made = memo[id(module)] = type(module).__new__(type(module))
    ours = ("forward", "__deepcopy__")
    made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in vars(module).items() if key not in ours})
    return made


def use_fast_experts(model: nn.Module) -> FastExperts:
    """Compute the experts of ``model`` by our backends; routers, overrides and records stay as they are.

    Families that transformers' experts interface reaches are switched there (under the name ``moesaic``); where it does
    not reach, the bank's own forward is replaced if ours gives the same on a few rows. Logits and gradients agree with
    the eager ones within rounding (1e-5 in float32 on small models); sums over a row's experts are taken in float32
    also in a bfloat16 model. A deep copy of the model taken meanwhile is as the model was before.

    Args:
        model: a model of transformers or any module that holds one; layers of ours are fast already.

    Returns:
        What was covered and what not and why (``print`` it). Call ``undo()``, or use it as a context manager.

    Raises:
        ValueError: no MoE layer, or none that can be covered, with the reasons.
    """
    done = FastExperts()
    for layer in moe_layers(model):
        reason = _switch(layer, done)
        if reason:
            done.refused[layer.name] = reason
    if not done.covered:
        raise ValueError(f"no MoE layer of {type(model).__name__} can run by our backends: {_reasons(done.refused)}")
    _log.info("%s", done)
    return done


def _switch(layer: MoELayer, done: FastExperts) -> str:
    """Make one layer fast and note it; the reason where that is not possible."""
    bank = layer.experts
    if isinstance(bank, ForeignBank) and type(bank) not in (ForeignExperts, FlatExperts):
        return "its experts are stored or called in a form of their own"
    if not isinstance(bank, ForeignExperts | FlatExperts):
        done.covered[layer.name] = "of ours, fast already"
        return ""
    module = bank.module
    reason = _unreadable(bank)
    if reason:
        return reason
    if _reached(module):
        config: Any = module.config
        if config._experts_implementation_internal != NAME:
            before = config._experts_implementation_internal
            done._configs.append((config, before))
            config._experts_implementation_internal = Switched(before)
        done.covered[layer.name] = "through transformers' experts interface"
        return ""
    reason = _replace(bank, done)
    if not reason:
        done.covered[layer.name] = "with the bank's forward replaced"
    return reason


def _unreadable(bank: ForeignExperts | FlatExperts) -> str:
    for name, tensor in bank.module.named_parameters():
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            return f"its weights are quantized ({name} is {tensor.dtype})"
    return ""


def _reached(module: nn.Module) -> bool:
    """Whether the interface that holds our function decides what the bank's forward does; registers it there."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    forward = inspect.unwrap(type(module).forward, stop=lambda f: "experts_interface" in f.__code__.co_freevars)
    if "experts_interface" not in forward.__code__.co_freevars or "forward" in vars(module):
        return False
    if inspect.getclosurevars(forward).nonlocals["experts_interface"] is not ALL_EXPERTS_FUNCTIONS:
        return False
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, fast_experts_forward)
    return True


@torch.no_grad()
def _replace(bank: ForeignExperts | FlatExperts, done: FastExperts) -> str:
    module = bank.module
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        return "its forward has been replaced already (by an offloader or another library)"
    first = next(module.parameters())
    if first.is_meta:
        return "its weights are not in memory (meta device), so the replacement cannot be checked"
    generator = torch.Generator().manual_seed(0)
    choices = bank.num_experts + bank.identities
    x_TD = torch.randn((4, bank.dim), generator=generator).to(first)
    ids_TK = torch.rand((4, choices), generator=generator).argsort(1)[:, : min(2, choices)].to(first.device)
    weights_TK = torch.rand(ids_TK.shape, generator=generator).to(first) + 0.5
    try:
        want: Tensor = module(x_TD, ids_TK, weights_TK)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"its forward does not take (x, ids, weights) ({type(error).__name__}: {error})"
    try:
        got = fast_experts_forward(module, x_TD, ids_TK, weights_TK)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"its structure could not be computed ({type(error).__name__}: {error})"
    tolerance = 1e-4 if first.dtype in (torch.float32, torch.float64) else 3e-2
    if got.numel() != want.numel() or not torch.allclose(got.flatten(), want.flatten(), tolerance, tolerance):
        return "its forward computes something else than the experts that its weights describe"
    module.forward = types.MethodType(fast_experts_forward, module)
    module.__dict__["__deepcopy__"] = types.MethodType(_copy_as_it_was, module)
    done._modules.append(module)
    return ""


def _grouped(named: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, text in named.items():
        groups.setdefault(text, []).append(name)
    return groups


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{_some(names)}: {why}" for why, names in _grouped(refused).items())
