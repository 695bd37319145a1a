"""Parameters name their axes and their role once; growth, pruning, optimizers and reports read it here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

ROLES = (
    "router",
    "expert-in",
    "expert-out",
    "expert-bias",
    "dense",
    "embedding",
    "head",
    "norm",
    "bias",
    "scalar",
)


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is.

    Args:
        axes: name of each axis in order: ``"expert"``, ``"model"``, ``"width"`` (expert hidden), ``"out"``, ``"in"``,
            ``"vocab"`` ...
        role: one of ``ROLES``; ``"dense"`` is a matrix that every token passes through.
    """

    axes: tuple[str, ...]
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {self.role!r}")


def parameter_specs(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """Every parameter of ``model`` with its specification, each once (tied ones under their first name).

    A module declares its own in a mapping ``parameter_axes`` (name -> :class:`ParameterSpec`); what nobody declared is
    read from the kind of the module: matrices of ``Linear`` are dense, of ``Embedding`` embeddings, the rest by
    dimension.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        declared: Mapping[str, ParameterSpec] = getattr(module, "parameter_axes", {})
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            spec = declared.get(name) or _guess(module, parameter)
            yield (f"{prefix}.{name}" if prefix else name), parameter, spec


def _guess(module: nn.Module, parameter: nn.Parameter) -> ParameterSpec:
    if isinstance(module, nn.Embedding):
        return ParameterSpec(("vocab", "model"), "embedding")
    if parameter.dim() == 2:
        return ParameterSpec(("out", "in"), "dense")
    if parameter.dim() == 0:
        return ParameterSpec((), "scalar")
    if "Norm" in type(module).__name__:
        return ParameterSpec(("model",) * parameter.dim(), "norm")
    return ParameterSpec(("out",) * parameter.dim(), "bias" if parameter.dim() == 1 else "dense")
