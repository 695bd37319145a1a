"""Whole models: the reference language model, handles on any model's MoE layers, load and export."""

from moesaic.models.configuration import MoesaicConfig
from moesaic.models.handle import MoELayer, moe_layers
from moesaic.models.load import load
from moesaic.models.modeling import MoesaicForCausalLM, MoesaicModel, MoesaicOutput
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing

__all__ = [
    "MoELayer",
    "MoesaicConfig",
    "MoesaicForCausalLM",
    "MoesaicModel",
    "MoesaicOutput",
    "load",
    "moe_layers",
    "override_routing",
    "record_routing",
]
