"""Training: the loop, its configuration, optimizers, checkpoints and reports."""

from moesaic.training.config import (
    AverageConfig,
    DataConfig,
    MuonConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
)
from moesaic.training.diagnosis import NonFiniteError
from moesaic.training.evaluation import Evaluation, evaluate_tokens
from moesaic.training.muon import Muon, orthogonalize
from moesaic.training.observers import MetricsFile, Observer, ProgressLine, TensorBoard
from moesaic.training.optimizers import Optimizers, build_optimizers
from moesaic.training.report import TrainReport
from moesaic.training.text_data import TextData, load_text_data
from moesaic.training.trainer import Trainer

__all__ = [
    "AverageConfig",
    "DataConfig",
    "Evaluation",
    "MetricsFile",
    "Muon",
    "MuonConfig",
    "NonFiniteError",
    "Observer",
    "OptimizerConfig",
    "Optimizers",
    "ProgressLine",
    "RunConfig",
    "ScheduleConfig",
    "StageConfig",
    "TensorBoard",
    "TextData",
    "TrainConfig",
    "TrainReport",
    "Trainer",
    "build_optimizers",
    "evaluate_tokens",
    "load_text_data",
    "orthogonalize",
]
