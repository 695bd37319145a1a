"""Layers that models are built of."""

from moesaic.layers.bare import BareMoE, collect_routings
from moesaic.layers.latent import LatentMoEConfig, matched_top_k
from moesaic.layers.latent_conversion import LatentConversion, compress_moe
from moesaic.layers.moe import MoE
from moesaic.layers.multi_head_latent import MultiHeadMoEConfig

__all__ = [
    "BareMoE",
    "LatentConversion",
    "LatentMoEConfig",
    "MoE",
    "MultiHeadMoEConfig",
    "collect_routings",
    "compress_moe",
    "matched_top_k",
]
