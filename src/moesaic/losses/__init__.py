"""Auxiliary losses: pure functions of a routing, and the parts that add them to a layer."""

from moesaic.losses.balance import BalanceLoss, balance_loss
from moesaic.losses.base import RoutingLoss
from moesaic.losses.entropy import EntropyLoss, entropy_loss, mean_entropy_loss
from moesaic.losses.importance import ImportanceLoss, importance_loss
from moesaic.losses.z import ZLoss, z_loss

__all__ = [
    "BalanceLoss",
    "EntropyLoss",
    "ImportanceLoss",
    "RoutingLoss",
    "ZLoss",
    "balance_loss",
    "entropy_loss",
    "importance_loss",
    "mean_entropy_loss",
    "z_loss",
]
