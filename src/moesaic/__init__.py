"""moesaic: Mixture-of-Experts models as parts that combine.

The public names are listed here, once. They are loaded when first used, so that importing the package costs next to
nothing; ``AutoModelForCausalLM`` knows the model type ``moesaic`` from the first import on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import moesaic._start  # noqa: F401 - first: until the command line runs, Ctrl-C ends it with one line
from moesaic._version import __version__
from moesaic.models.registration import register_when_loaded

if TYPE_CHECKING:
    from moesaic.experts import Experts, FFNExperts, SharedExpert, dense_reference
    from moesaic.layers import MoE
    from moesaic.losses import BalanceLoss, EntropyLoss, ImportanceLoss, RoutingLoss, ZLoss
    from moesaic.models import (
        MoELayer,
        MoesaicConfig,
        MoesaicForCausalLM,
        RoutingTrace,
        drop_experts,
        duplicate_experts,
        export,
        load,
        merge_experts,
        moe_layers,
        override_routing,
        rearrange_experts,
        record_routing,
        remap_optimizer,
        reorder_experts,
        save,
        use_fast_experts,
    )
    from moesaic.routing import (
        Context,
        CosineRouter,
        DynamicTopPRouter,
        ExpertChoiceRouter,
        PrincipalSubspaceRouter,
        ReLURouter,
        Router,
        Routing,
        TopKRouter,
        TopPRouter,
        checks,
        end_step,
        test_time_adaptation,
    )
    from moesaic.training import TrainConfig, Trainer

# Name -> module below moesaic. One list: documentation, tests and `from moesaic import *` read it.
_HOME = {
    "BalanceLoss": "losses",
    "Context": "routing",
    "CosineRouter": "routing",
    "DynamicTopPRouter": "routing",
    "EntropyLoss": "losses",
    "ExpertChoiceRouter": "routing",
    "Experts": "experts",
    "FFNExperts": "experts",
    "ImportanceLoss": "losses",
    "MoE": "layers",
    "MoELayer": "models",
    "MoesaicConfig": "models",
    "MoesaicForCausalLM": "models",
    "PrincipalSubspaceRouter": "routing",
    "ReLURouter": "routing",
    "Router": "routing",
    "Routing": "routing",
    "RoutingTrace": "models",
    "RoutingLoss": "losses",
    "SharedExpert": "experts",
    "TopKRouter": "routing",
    "TopPRouter": "routing",
    "TrainConfig": "training",
    "Trainer": "training",
    "ZLoss": "losses",
    "checks": "routing",
    "dense_reference": "experts",
    "drop_experts": "models",
    "duplicate_experts": "models",
    "end_step": "routing",
    "export": "models",
    "load": "models",
    "merge_experts": "models",
    "moe_layers": "models",
    "override_routing": "models",
    "rearrange_experts": "models",
    "record_routing": "models",
    "remap_optimizer": "models",
    "reorder_experts": "models",
    "save": "models",
    "test_time_adaptation": "routing",
    "use_fast_experts": "models",
}

__all__ = [
    "BalanceLoss",
    "Context",
    "CosineRouter",
    "DynamicTopPRouter",
    "EntropyLoss",
    "ExpertChoiceRouter",
    "Experts",
    "FFNExperts",
    "ImportanceLoss",
    "MoE",
    "MoELayer",
    "MoesaicConfig",
    "MoesaicForCausalLM",
    "PrincipalSubspaceRouter",
    "ReLURouter",
    "Router",
    "Routing",
    "RoutingLoss",
    "RoutingTrace",
    "SharedExpert",
    "TopKRouter",
    "TopPRouter",
    "TrainConfig",
    "Trainer",
    "ZLoss",
    "__version__",
    "checks",
    "dense_reference",
    "drop_experts",
    "duplicate_experts",
    "end_step",
    "export",
    "load",
    "merge_experts",
    "moe_layers",
    "override_routing",
    "rearrange_experts",
    "record_routing",
    "remap_optimizer",
    "reorder_experts",
    "save",
    "test_time_adaptation",
    "use_fast_experts",
]

register_when_loaded()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moesaic.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
