"""What is done there: contract 2 (Experts) and the banks, one file each."""

from moesaic.experts.base import Experts, dense_reference

__all__ = ["Experts", "dense_reference"]
