"""Layers that models are built of."""

from moesaic.layers.bare import BareMoE, collect_routings
from moesaic.layers.moe import MoE

__all__ = ["BareMoE", "MoE", "collect_routings"]
