"""Training: the loop, its configuration, optimizers, checkpoints and reports."""

from moesaic.training.causal_lm import CausalLM, evaluate_tokens
from moesaic.training.config import (
    AverageConfig,
    DataConfig,
    EarlyStoppingConfig,
    MuonConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
)
from moesaic.training.diagnosis import NonFiniteError
from moesaic.training.execution import Execution
from moesaic.training.hooks import Hook
from moesaic.training.muon import Muon, orthogonalize
from moesaic.training.observers import MetricsFile, Observer, ProgressLine, TensorBoard
from moesaic.training.optimizers import Optimizers, build_optimizers
from moesaic.training.report import TrainReport
from moesaic.training.stream import train_stream
from moesaic.training.task import Evaluation, Step, Task, TaskLoss
from moesaic.training.text_data import TextData, load_text_data
from moesaic.training.trainer import Trainer

__all__ = [
    "AverageConfig",
    "CausalLM",
    "DataConfig",
    "EarlyStoppingConfig",
    "Evaluation",
    "Execution",
    "Hook",
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
    "Step",
    "Task",
    "TaskLoss",
    "TensorBoard",
    "TextData",
    "TrainConfig",
    "TrainReport",
    "Trainer",
    "build_optimizers",
    "evaluate_tokens",
    "load_text_data",
    "orthogonalize",
    "train_stream",
]
