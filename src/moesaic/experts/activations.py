"""What happens between the two projections of a feed-forward expert, with the gradient written out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(ABC):
    """The nonlinearity of a feed-forward expert: ``h = act(up)``, or ``h = act(gate, up)`` where ``gated``.

    :meth:`value` and :meth:`gradient` serve hand-written backward passes; calling the object is the plain
    differentiable form. Zero must map to zero: narrower experts are padded with it.
    """

    name: str
    gated: bool

    def __call__(self, up: Tensor, gate: Tensor | None = None) -> Tensor:
        """``h`` from the projections, all (..., F)."""
        return self.value(up, gate)[0]

    @abstractmethod
    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        """``h`` and what :meth:`gradient` wants again (which may share no memory with ``h``)."""

    @abstractmethod
    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of ``up`` and ``gate`` (None without one); may overwrite ``dh`` and ``part``."""


class SwiGLU(Activation):
    r""":math:`h = \mathrm{silu}(g) \cdot u` (arXiv:2002.05202), the usual expert of today's models."""

    name = "swiglu"
    gated = True

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        silu = F.silu(gate)
        return silu * up, silu

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, Tensor]:
        assert gate is not None
        dgate = torch.ops.aten.silu_backward(dh * up, gate)
        return part.mul_(dh), dgate


class GELU(Activation):
    r""":math:`h = u \, \Phi(u)`, exact (arXiv:1606.08415)."""

    name = "gelu"
    gated = False

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        return F.gelu(up), up

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, None]:
        return torch.ops.aten.gelu_backward(dh, up), None


class SquaredReLU(Activation):
    r""":math:`h = \max(u, 0)^2` (Primer, arXiv:2109.08668)."""

    name = "relu2"
    gated = False

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        relu = F.relu(up)
        return relu * relu, relu

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, None]:
        return dh.mul_(part).mul_(2), None


class GptOss(Activation):
    r"""The clamped gate of GPT-OSS (arXiv:2508.10925):

    .. math::
        h = (\bar u + 1) \, \bar g \, \sigma(\alpha \bar g), \quad
        \bar g = \min(g, c), \; \bar u = \mathrm{clip}(u, -c, c)

    with :math:`\alpha = 1.702` and :math:`c = 7`, the values of the published checkpoints.
    """

    name = "gpt_oss"
    gated = True
    alpha = 1.702
    limit = 7.0

    def value(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        gate = gate.clamp(max=self.limit)
        glu = gate * torch.sigmoid(self.alpha * gate)
        return (up.clamp(-self.limit, self.limit) + 1) * glu, glu

    def gradient(self, dh: Tensor, up: Tensor, gate: Tensor | None, part: Tensor) -> tuple[Tensor, Tensor]:
        assert gate is not None
        open_gate, open_up = gate <= self.limit, up.abs() <= self.limit
        gate = gate.clamp(max=self.limit)
        sigmoid = torch.sigmoid(self.alpha * gate)
        slope = sigmoid + self.alpha * gate * sigmoid * (1 - sigmoid)
        dgate = dh * (up.clamp(-self.limit, self.limit) + 1) * slope * open_gate
        return part.mul_(dh).mul_(open_up), dgate


ACTIVATIONS: dict[str, Activation] = {item.name: item for item in (SwiGLU(), GELU(), SquaredReLU(), GptOss())}


def activation_of(name: str | Activation) -> Activation:
    """The activation called ``name``.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(name, Activation):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
