"""The experts of a foreign bank, computed by our backends: what takes the place of the bank's own forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.experts.activations import Activation, SwiGLU
from moesaic.experts.backends import chosen_backend
from moesaic.experts.fused import Parameters, fused_ffn
from moesaic.models.adapters.banks import FlatExperts, called_bank
from moesaic.models.adapters.weights import ForeignExperts, plain_sum
from moesaic.routing.dispatch import Dispatch


def fast_experts_forward(module: nn.Module, x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum of a bank's experts, with the signature of transformers' experts interface.

    Banks with one set of weights and nothing learned between or behind the projections run through
    :func:`~moesaic.experts.fused.fused_ffn`; others, and all inside ``backend("reference")``, expert by expert in plain
    differentiable operations. What is being compiled goes to transformers' own ``grouped_mm``, which the compiler sees
    through.

    Args:
        module: the bank.
        x: (T, D) or (B, S, D) rows.
        ids_TK: expert ids; E (or more, where the bank has no identity experts) is an empty slot.
        weights_TK: combine weights.

    Returns:
        The routed sum, in the shape and dtype of ``x``.
    """
    if torch.compiler.is_compiling():
        return _compiled(module, x, ids_TK, weights_TK)
    bank = called_bank(module, type(module).__name__)
    x_TD = x.reshape(-1, x.shape[-1])
    parameters, x_TD = _compute_dtype(bank.parameters(), x_TD)
    experts = bank.num_experts
    dispatch = Dispatch.of(ids_TK.clamp(max=experts), experts)
    activation = _activation(bank)
    if activation is None or _learns_inside(module) or chosen_backend(x_TD) == "reference":
        y_TO = plain_sum(bank, parameters, x_TD, weights_TK, dispatch)
    else:
        y_TO = fused_ffn(x_TD, weights_TK, dispatch, parameters, activation)
    if bank.identities:
        chosen_TK = (ids_TK >= experts) & (ids_TK < experts + bank.identities)
        y_TO = y_TO + x_TD * (weights_TK * chosen_TK).sum(1, keepdim=True).to(x_TD.dtype)
    return y_TO.to(x.dtype).reshape(*x.shape[:-1], -1)


def _compiled(module: nn.Module, x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    reached = hasattr(module, "_is_expert_parallel")
    forward: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS["grouped_mm"] if reached else type(module).forward
    return forward(module, x, ids_TK, weights_TK)


def _compute_dtype(parameters: Parameters, x_TD: Tensor) -> tuple[Parameters, Tensor]:
    if torch.is_autocast_enabled(x_TD.device.type):
        dtype = torch.get_autocast_dtype(x_TD.device.type)
        return parameters.to(dtype), x_TD.to(dtype)
    return parameters, x_TD.to(parameters.up_EFD.dtype)


def _learns_inside(module: nn.Module) -> bool:
    """Whether there are parameters beside the projections: a learned activation, a norm behind every expert."""
    inner = (child for name, child in module.named_children() if name != "parametrizations")
    if getattr(module, "has_post_expert_norm", False):
        return True
    return any(parameter.dim() < 2 for child in inner for parameter in child.parameters())


def _activation(bank: ForeignExperts | FlatExperts) -> Activation | None:
    """What the fused computation does between the projections; None where it cannot."""
    own_gate = getattr(type(bank.module), "_apply_gate", None)
    plain_gate = own_gate is None or own_gate.__module__ == "transformers.integrations.moe"
    silu = type(bank.activation).__name__ in ("SiLU", "SiLUActivation")
    if isinstance(bank, FlatExperts):
        return SwiGLU() if silu else None
    if plain_gate and silu and bank.has_gate and bank.concatenated:
        return _JOINT_SWIGLU
    return _BankActivation(bank)


class _JointSwiGLU(Activation):
    """SwiGLU of gate and up in one matrix (N, 2F), gate first."""

    name = "joint_swiglu"
    gated = False

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        gate, up = up.chunk(2, dim=1)
        silu = F.silu(gate)
        return silu * up, silu

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, None]:
        both = torch.empty_like(up)
        dgate, dup = both.chunk(2, dim=1)
        gate, up = up.chunk(2, dim=1)
        torch.mul(part, dh, out=dup)
        torch.ops.aten.silu_backward.grad_input(dh.mul_(up), gate, grad_input=dgate)
        return both, None


_JOINT_SWIGLU = _JointSwiGLU()


class _BankActivation(Activation):
    """Whatever the bank does between its projections, differentiated by autograd, block by block."""

    name = "bank"
    gated = False

    def __init__(self, bank: ForeignExperts) -> None:
        self.bank = bank

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.bank.activate(up).to(up.dtype), up

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            up = up.detach().requires_grad_()
            h = self.bank.activate(up)
            (found,) = torch.autograd.grad(h, [up], dh.to(h.dtype))
        return found, None
