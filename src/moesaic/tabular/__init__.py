"""One-for-all anomaly detection on tables (OFA-TAD, arXiv:2603.14407)."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError('moesaic.tabular needs scikit-learn: pip install "moesaic[tabular]"')

from moesaic.tabular.anomalies import PseudoAnomalySampler
from moesaic.tabular.detector import OneForAllDetector
from moesaic.tabular.explain import Explanation
from moesaic.tabular.network import GatedViewMoE, NetworkConfig, ViewExpert, ViewScores
from moesaic.tabular.profiles import MultiViewDistanceEncoder
from moesaic.tabular.training import load_network, pretrain, pretrained_network, save_network

__all__ = [
    "Explanation",
    "GatedViewMoE",
    "MultiViewDistanceEncoder",
    "NetworkConfig",
    "OneForAllDetector",
    "PseudoAnomalySampler",
    "ViewExpert",
    "ViewScores",
    "load_network",
    "pretrain",
    "pretrained_network",
    "save_network",
]
