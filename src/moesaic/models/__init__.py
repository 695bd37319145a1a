"""Whole models: the reference language model, handles on any model's MoE layers, load and export.

Names are loaded when first used: importing transformers takes seconds, and ``import moesaic`` passes through here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.models.configuration import MoesaicConfig
    from moesaic.models.exporting import Exported, export
    from moesaic.models.fast import FastExperts, use_fast_experts
    from moesaic.models.handle import MoELayer, moe_layers
    from moesaic.models.loading import load
    from moesaic.models.modeling import MoesaicForCausalLM, MoesaicModel, MoesaicOutput
    from moesaic.models.override import override_routing
    from moesaic.models.record import record_routing
    from moesaic.models.replace import replace_layers, trained_experts
    from moesaic.models.saving import Saved, save
    from moesaic.models.surgery import (
        Surgery,
        drop_experts,
        duplicate_experts,
        merge_experts,
        rearrange_experts,
        reorder_experts,
    )
    from moesaic.models.surgery_optimizer import remap_optimizer
    from moesaic.models.swap import swap_routing
    from moesaic.models.trace import RoutingTrace

_HOME = {
    "Exported": "exporting",
    "FastExperts": "fast",
    "MoELayer": "handle",
    "MoesaicConfig": "configuration",
    "MoesaicForCausalLM": "modeling",
    "MoesaicModel": "modeling",
    "MoesaicOutput": "modeling",
    "Saved": "saving",
    "Surgery": "surgery",
    "drop_experts": "surgery",
    "duplicate_experts": "surgery",
    "export": "exporting",
    "load": "loading",
    "merge_experts": "surgery",
    "moe_layers": "handle",
    "override_routing": "override",
    "rearrange_experts": "surgery",
    "RoutingTrace": "trace",
    "record_routing": "record",
    "remap_optimizer": "surgery_optimizer",
    "reorder_experts": "surgery",
    "replace_layers": "replace",
    "save": "saving",
    "swap_routing": "swap",
    "trained_experts": "replace",
    "use_fast_experts": "fast",
}

__all__ = [
    "Exported",
    "FastExperts",
    "MoELayer",
    "MoesaicConfig",
    "MoesaicForCausalLM",
    "MoesaicModel",
    "MoesaicOutput",
    "RoutingTrace",
    "Saved",
    "Surgery",
    "drop_experts",
    "duplicate_experts",
    "export",
    "load",
    "merge_experts",
    "moe_layers",
    "override_routing",
    "rearrange_experts",
    "record_routing",
    "remap_optimizer",
    "reorder_experts",
    "replace_layers",
    "save",
    "swap_routing",
    "trained_experts",
    "use_fast_experts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moesaic.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moesaic.models.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
