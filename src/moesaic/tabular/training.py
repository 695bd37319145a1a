"""Training one network on several source tables, and keeping it in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.formats.atomic import atomic_file
from moesaic.tabular.anomalies import PseudoAnomalySampler
from moesaic.tabular.network import GatedViewMoE, NetworkConfig
from moesaic.tabular.profiles import MultiViewDistanceEncoder
from moesaic.training import Hook, Optimizers, Step, Task, TaskLoss, TrainConfig, Trainer

logger = logging.getLogger("moesaic.tabular")

SOURCE_TABLES = ("vertebral", "annthyroid", "comm.and.crime", "Cardiotocography", "wine", "imgseg", "satellite")
"""The paper's source tables, names of :func:`moesaic.data.tables.load_table`."""

ASSET = "one-for-all.safetensors"
_FORMAT = "moesaic.tabular.GatedViewMoE/1"


@dataclass(frozen=True)
class SourceTask:
    """Profiles of one source table: its rows (label 0) and as many pseudo-anomalies (label 1).

    Args:
        profile_TEK: (2n, M, k) float32.
        label_T: (2n,) float32.
    """

    profile_TEK: Tensor
    label_T: Tensor

    def to(self, device: torch.device) -> SourceTask:
        """The same on another device."""
        return SourceTask(self.profile_TEK.to(device), self.label_T.to(device))


def source_task(
    context: ArrayLike,
    config: NetworkConfig,
    sampler: PseudoAnomalySampler,
    rng: np.random.Generator,
    *,
    joint: bool = False,
    backend: str = "sklearn",
) -> SourceTask:
    """Make the training set of one source table.

    Args:
        context: its normal rows (n, d).
        config: names the views and the number of neighbours.
        sampler: makes the pseudo-anomalies.
        rng: source of all randomness.
        joint: False (the paper's code) draws pseudo-anomalies in each view's own space, so that row i of one view and
            row i of another are different points; True draws them once in raw space and carries them into all views.
        backend: of the neighbour search.

    Raises:
        ValueError: rows that :class:`MultiViewDistanceEncoder` refuses.
    """
    encoder = MultiViewDistanceEncoder(config.views, config.ranks, backend)
    normal_TEK = encoder.fit_context(context)
    rows_TD = np.asarray(context, dtype=np.float64)
    if joint:
        views = encoder.to_views(sampler.sample(rows_TD, len(rows_TD), rng))
    else:
        views = [sampler.sample(view_TD, len(rows_TD), rng) for view_TD in encoder.to_views(rows_TD)]
    profile_TEK = np.concatenate([normal_TEK, encoder.profiles_of(views)])
    label_T = np.repeat(np.array([0.0, 1.0], dtype=np.float32), len(rows_TD))
    return SourceTask(torch.from_numpy(profile_TEK), torch.from_numpy(label_T))


def pretrain(
    contexts: Sequence[ArrayLike],
    *,
    config: NetworkConfig | None = None,
    sampler: PseudoAnomalySampler | None = None,
    joint: bool = False,
    epochs: int = 15,
    lr: float = 5e-4,
    weight_decay: float = 2e-5,
    gate_entropy_weight: float = 0.0,
    chunk_rows: int = 32,
    seed: int = 1,
    backend: str = "sklearn",
    progress: Callable[[int, float], None] | None = None,
) -> GatedViewMoE:
    """Train the one network on source tables (arXiv:2603.14407).

    An epoch takes one full-batch step per table in random order: with the paper's 7 tables and 15 epochs 105 in all.
    Profiles and pseudo-anomalies are made once. The loss is that of :class:`AnomalyScores`.

    Args:
        contexts: normal rows of each source table, (n_i, d_i).
        config: the network's shape; the paper's by default.
        sampler: makes pseudo-anomalies; the paper's five generators by default.
        joint: see :func:`source_task`.
        epochs: rounds over the tables.
        lr: Adam's learning rate.
        weight_decay: Adam's (not decoupled).
        gate_entropy_weight: see :class:`AnomalyScores`.
        chunk_rows: rows whose activations are held at once; changes memory, not the step.
        seed: of weights, pseudo-anomalies and order.
        backend: of the neighbour search.
        progress: called after each epoch with its number from 1 and its mean loss.

    Raises:
        ValueError: no tables, or a parameter outside its range.
    """
    if len(contexts) < 1:
        raise ValueError("contexts is empty; at least one source table is needed")
    check_count("epochs", epochs)
    check_count("seed", seed, 0)
    config, sampler = config or NetworkConfig(), sampler or PseudoAnomalySampler()
    rng = np.random.default_rng(seed)
    tables = [source_task(context, config, sampler, rng, joint=joint, backend=backend) for context in contexts]
    order = np.concatenate([rng.permutation(len(tables)) for _ in range(epochs)])
    task = AnomalyScores(tables, order, chunk_rows=chunk_rows, gate_entropy_weight=gate_entropy_weight)
    model = GatedViewMoE(config, seed=seed)

    def adam(model: nn.Module) -> Optimizers:
        named: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        return Optimizers({"adam": torch.optim.Adam(list(named), lr=lr, weight_decay=weight_decay)}, named)

    Trainer(
        model,
        task,
        TrainConfig(steps=len(order), clip=None, seed=seed, log_every=len(order)),
        hooks=[_Epochs(len(tables), epochs, progress)],
        optimizers=adam,
        schedule=lambda progress, step: 1.0,
    ).train()
    return model.eval()


class AnomalyScores(Task[SourceTask]):
    r"""Rows of source tables scored 0, their pseudo-anomalies scored 1; a step is one table, whole.

    .. math:: L = \frac1n \sum_i (s_i - y_i)^2 + \lambda \frac1n \sum_i \sum_m g_{im} \log g_{im}

    Chunks of rows are the micro-batches of a step: means over rows split exactly, so their size changes memory, not the
    step. The entropy term is ours: the paper's abstract speaks of entropy-regularised gating, its code has none, hence
    the default 0; a positive weight keeps one view from taking over.

    Args:
        tables: the training set of each source table.
        order: the table of each step.
        chunk_rows: rows whose activations are held at once, at least 1.
        gate_entropy_weight: lambda, at least 0.

    Raises:
        ValueError: a parameter outside its range.
    """

    unit = "rows"
    loss_unit = "squared error of the score"

    def __init__(
        self,
        tables: Sequence[SourceTask],
        order: Sequence[int] | np.ndarray,
        *,
        chunk_rows: int = 32,
        gate_entropy_weight: float = 0.0,
    ) -> None:
        check_count("chunk_rows", chunk_rows)
        if gate_entropy_weight < 0:
            raise ValueError(f"gate_entropy_weight is {gate_entropy_weight}; it must be at least 0")
        self.tables = list(tables)
        self.order = [int(number) for number in order]
        self.chunk_rows = chunk_rows
        self.gate_entropy_weight = gate_entropy_weight

    def batches(self, step: Step) -> list[SourceTask]:
        """The rows of the step's table, in chunks."""
        table = self.tables[self.order[step.number]]
        pieces = zip(torch.split(table.profile_TEK, self.chunk_rows), torch.split(table.label_T, self.chunk_rows))
        return [SourceTask(profile_TEK, label_T) for profile_TEK, label_T in pieces]

    def count(self, batch: SourceTask) -> int:
        """Rows."""
        return len(batch.label_T)

    def loss(self, model: nn.Module, batch: SourceTask) -> TaskLoss:
        """Summed over the rows of a chunk."""
        out = model(batch.profile_TEK)
        total = (out.score_T - batch.label_T.to(out.score_T.dtype)).square().sum()
        if self.gate_entropy_weight:
            total = total - self.gate_entropy_weight * out.routing.entropy_T.sum()
        return TaskLoss(total, routings=(out.routing,))

    def fingerprint(self) -> str:
        """Digest of profiles, labels and order."""
        digest = hashlib.blake2b(np.asarray(self.order, dtype=np.int64).tobytes(), digest_size=8)
        for table in self.tables:
            digest.update(table.profile_TEK.numpy().tobytes() + table.label_T.numpy().tobytes())
        return digest.hexdigest()


class _Epochs(Hook):
    """Says the mean loss of each epoch."""

    name = "epochs"

    def __init__(self, steps: int, epochs: int, progress: Callable[[int, float], None] | None) -> None:
        self.steps, self.epochs, self.progress = steps, epochs, progress
        self.losses: list[float] = []

    def after_step(self, trainer: Trainer) -> None:
        self.losses.append(float(trainer.step_loss))
        epoch, rest = divmod(trainer.state.position.step, self.steps)
        if rest == 0:
            mean = sum(self.losses) / len(self.losses)
            self.losses.clear()
            logger.info("epoch %d of %d: mean loss %.4f", epoch, self.epochs, mean)
            if self.progress is not None:
                self.progress(epoch, mean)


def save_network(model: GatedViewMoE, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write a network to a safetensors file.

    Args:
        model: the network.
        path: where to.
        metadata: more strings for the file's header, such as what it was trained on.
    """
    header = {**(metadata or {}), "format": _FORMAT, "config": json.dumps(model.config.to_dict())}
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    with atomic_file(path) as file:
        file.write(save(tensors, metadata=header))


def load_network(path: str | os.PathLike[str]) -> GatedViewMoE:
    """Read a network that :func:`save_network` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, or tensors that do not fit its configuration.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open has no iteration)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if header.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has the format {header.get('format')!r}, expected {_FORMAT!r}: it holds something else"
        )
    model = GatedViewMoE(NetworkConfig(**json.loads(header["config"])))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error
    return model.eval()


def pretrained_network() -> GatedViewMoE:
    """The network that ships with the package (its card lies beside it: ``assets/CARD.md``)."""
    with resources.as_file(resources.files("moesaic.tabular").joinpath("assets", ASSET)) as path:
        return load_network(path)
