"""The one table of parts that a configuration can name; a new part joins by a line here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from moesaic.experts import Experts, FFNExperts, LatentExperts, MultiHeadLatentExperts, SharedExpert
from moesaic.losses import BalanceLoss, EntropyLoss, ImportanceLoss, RoutingLoss, ZLoss
from moesaic.routing import (
    CosineRouter,
    DynamicTopPRouter,
    ExpertChoiceRouter,
    MultiHeadRouter,
    PairChoiceRouter,
    PrincipalSubspaceRouter,
    ReLURouter,
    Router,
    TopKRouter,
    TopPRouter,
)

ROUTERS: dict[str, type[Router]] = {
    "top_k": TopKRouter,
    "cosine": CosineRouter,
    "relu": ReLURouter,
    "expert_choice": ExpertChoiceRouter,
    "pair_choice": PairChoiceRouter,
    "principal_subspace": PrincipalSubspaceRouter,
    "dynamic_top_p": DynamicTopPRouter,
    "top_p": TopPRouter,
    "multi_head": MultiHeadRouter,
}
EXPERTS: dict[str, type[Experts]] = {
    "ffn": FFNExperts,
    "latent": LatentExperts,
    "multi_head_latent": MultiHeadLatentExperts,
}
SHARED: dict[str, type[nn.Module]] = {"ffn": SharedExpert}
# As a router: the bank routes itself.
BANK_ROUTES = "bank"
LOSSES: dict[str, type[RoutingLoss]] = {
    "balance": BalanceLoss,
    "importance": ImportanceLoss,
    "z": ZLoss,
    "entropy": EntropyLoss,
}


def build(table: Mapping[str, type[Any]], kind: str, spec: Mapping[str, Any] | str, **given: Any) -> Any:
    """Make the part that ``spec`` names.

    Args:
        table: one of the tables above.
        kind: what it is, for messages (``"router"``).
        spec: ``{"name": ..., argument: value, ...}``, or the bare name.
        **given: arguments that the model knows (``dim``, ``num_experts``); those that the part does not take are left
            out.

    Raises:
        ValueError: no name, an unknown one, an argument that the part does not take, or that it refuses.
    """
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = spec.pop("name", None)
    if name not in table:
        raise ValueError(f"{kind} names {name!r}; allowed are {sorted(table)}")
    part = table[name]
    accepted = _arguments(part)
    unknown = sorted(key for key in spec if accepted is not None and key not in accepted)
    if unknown:
        assert accepted is not None
        raise ValueError(f"{kind} {name!r} does not take {unknown}; it takes {sorted(accepted - set(given))}")
    arguments = {key: value for key, value in given.items() if accepted is None or key in accepted} | spec
    try:
        return part(**arguments)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error


def _arguments(part: type[Any]) -> set[str] | None:
    """Names that a class can be made with, those of its bases included where it passes them on; None for any."""
    names: set[str] = set()
    for base in part.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None
