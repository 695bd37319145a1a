"""What is done there: contract 2 (Experts) and the banks, one file each."""

from moesaic.experts.activations import ACTIVATIONS, Activation
from moesaic.experts.backends import backend
from moesaic.experts.base import Experts, dense_reference
from moesaic.experts.ffn import FFNExperts
from moesaic.experts.latent import LatentExperts
from moesaic.experts.shared import SharedExpert

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Experts",
    "FFNExperts",
    "LatentExperts",
    "SharedExpert",
    "backend",
    "dense_reference",
]
