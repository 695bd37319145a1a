"""What is done there: contract 2 (Experts) and the banks, one file each."""

from moesaic.experts.activations import ACTIVATIONS, Activation
from moesaic.experts.backends import backend
from moesaic.experts.base import Experts, dense_reference
from moesaic.experts.ffn import FFNExperts
from moesaic.experts.ffn_attention import ffn_as_attention
from moesaic.experts.latent import LatentExperts
from moesaic.experts.multi_head_latent import MultiHeadLatentExperts
from moesaic.experts.packing import pack_tokens
from moesaic.experts.shared import SharedExpert

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Experts",
    "FFNExperts",
    "LatentExperts",
    "MultiHeadLatentExperts",
    "SharedExpert",
    "backend",
    "dense_reference",
    "ffn_as_attention",
    "pack_tokens",
]
