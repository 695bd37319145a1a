"""What is trained: a task gives batches, their loss, an evaluation and a fingerprint; the trainer does all the rest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from moesaic.routing import Routing
from moesaic.training.config import StageConfig, TrainConfig

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class Step:
    """The step whose batches are asked for.

    Attributes:
        number: optimizer steps taken before it.
        stage: index of the batch-shape stage it lies in.
        first: number, counted from the start of the stage, of its first micro-batch.
        micro_batches: how many micro-batches it has by the configuration.
        shape: batch and length of the stage.
    """

    number: int
    stage: int
    first: int
    micro_batches: int
    shape: StageConfig


@dataclass(frozen=True, eq=False)
class TaskLoss:
    """Loss of one micro-batch.

    Attributes:
        total: sum over what counts (tokens, rows, windows ...) of the task's own loss, a scalar with gradient. The
            trainer divides by the count of the whole step.
        aux: sum over layers of the auxiliary losses, coefficients included, a scalar; None without any.
        routings: one per MoE layer, where the model gives them.
        metrics: name -> sum over what counts, without gradient; logged as means over the step.
    """

    total: Tensor
    aux: Tensor | None = None
    routings: Sequence[Routing] = ()
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What a model achieves on held-out data.

    Attributes:
        loss: mean loss, lower is better; auxiliary losses are no part of it. Early stopping goes by it.
        count: how many tokens, rows ... it is the mean of.
        metrics: further numbers, name -> value.
    """

    loss: float
    count: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss), for a loss in nats."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Task(ABC, Generic[BatchT]):
    """One kind of problem: causal language modelling, classification, forecasting, anomaly scores, a policy ...

    The trainer owns steps, accumulation, clipping, autocast, optimizers, schedules, early stopping, checkpoints,
    resumption, interrupts, progress and metrics. A task answers with functions of their arguments: the batches of a
    step depend on the step's numbers alone (and on seeds given at construction), which is what makes a resumed run
    the uninterrupted one, bit for bit.

    Attributes:
        unit: what is counted, in the plural, as metrics and reports name it.
        loss_unit: what the loss is measured in.
    """

    unit: str = "items"
    loss_unit: str = "per item"

    def check(self, config: TrainConfig) -> None:
        """Refuse at the door what cannot be trained with ``config``.

        Raises:
            ValueError: naming the argument, its value and what is allowed.
        """

    @abstractmethod
    def batches(self, step: Step) -> Sequence[BatchT]:
        """The micro-batches of one optimizer step, a function of ``step`` alone."""

    @abstractmethod
    def count(self, batch: BatchT) -> int:
        """How many tokens, rows ... of ``batch`` its loss sums over, known before anything is computed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: BatchT) -> TaskLoss:
        """The summed loss of one micro-batch; called in evaluation mode too, when a broken run is diagnosed."""

    def move(self, batch: BatchT, device: torch.device) -> BatchT:
        """``batch`` on ``device``."""
        moved: Any = batch
        return moved.to(device)  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module, config: TrainConfig) -> Evaluation | None:
        """Loss on held-out data; None where there is none. The model's mode must come back as it was."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Short digest of the training data: a checkpoint is resumed on the same only."""

    def describe(self, folder: Path) -> None:
        """Write what belongs beside a saved model (a tokenizer, label names) into ``folder``."""


def step_loss(loss: TaskLoss, count: int, step_count: int, main: float = 1.0, aux: float = 1.0) -> Tensor:
    r"""The part of the step's loss that one micro-batch contributes.

    .. math:: \frac{\text{main} \cdot \sum_{t \in i} \ell_t + \text{aux} \cdot n_i A_i}{\sum_j n_j}

    with :math:`n_i` counted items and the auxiliary loss :math:`A_i` of micro-batch :math:`i`: the mean over all items
    of the step, and the item-weighted mean of the auxiliary losses. The same micro-batch four times gives the gradient
    of one.

    Args:
        loss: of the micro-batch.
        count: its items.
        step_count: items of the whole step.
        main: factor on the task's own loss.
        aux: factor on the auxiliary losses.
    """
    total = loss.total * (main / step_count)
    if loss.aux is not None and aux:
        total = total + loss.aux * (aux * count / step_count)
    return total


def auxiliary_loss(routings: Sequence[Routing]) -> Tensor | None:
    """Sum of all losses that the routings carry, a scalar; None where they carry none."""
    values = [value for routing in routings for value in routing.losses.values()]
    return torch.stack(values).sum() if values else None


def auxiliary_terms(routings: Sequence[Routing]) -> dict[str, Tensor]:
    """Sum over layers of each auxiliary loss, name -> scalar without gradient."""
    terms: dict[str, Tensor] = {}
    for routing in routings:
        for name, value in routing.losses.items():
            terms[name] = terms[name] + value.detach() if name in terms else value.detach()
    return terms
