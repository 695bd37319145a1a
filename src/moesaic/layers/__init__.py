"""Layers that models are built of."""

from moesaic.layers.moe import MoE

__all__ = ["MoE"]
