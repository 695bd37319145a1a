"""Training one network on several source tables, and keeping it in a file."""

from __future__ import annotations

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
from torch import Tensor

from moesaic.formats.atomic import atomic_file
from moesaic.tabular.anomalies import PseudoAnomalySampler
from moesaic.tabular.network import GatedViewMoE, NetworkConfig
from moesaic.tabular.profiles import MultiViewDistanceEncoder

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
    Profiles and pseudo-anomalies are made once. The loss is that of :func:`accumulate_loss`.

    Args:
        contexts: normal rows of each source table, (n_i, d_i).
        config: the network's shape; the paper's by default.
        sampler: makes pseudo-anomalies; the paper's five generators by default.
        joint: see :func:`source_task`.
        epochs: rounds over the tables.
        lr: Adam's learning rate.
        weight_decay: Adam's (not decoupled).
        gate_entropy_weight: see :func:`accumulate_loss`.
        chunk_rows: rows whose activations are held at once; changes memory, not the step.
        seed: of weights, pseudo-anomalies and order.
        backend: of the neighbour search.
        progress: called after each epoch with its number from 1 and its mean loss.

    Raises:
        ValueError: no tables, or a parameter outside its range.
    """
    if len(contexts) < 1:
        raise ValueError("contexts is empty; at least one source table is needed")
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; it must be at least 1")
    config, sampler = config or NetworkConfig(), sampler or PseudoAnomalySampler()
    rng = np.random.default_rng(seed)
    tasks = [source_task(context, config, sampler, rng, joint=joint, backend=backend) for context in contexts]
    model = GatedViewMoE(config, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    for epoch in range(1, epochs + 1):
        losses = []
        for number in rng.permutation(len(tasks)):
            optimizer.zero_grad()
            losses.append(
                accumulate_loss(model, tasks[number], chunk_rows=chunk_rows, gate_entropy_weight=gate_entropy_weight)
            )
            optimizer.step()
        mean = sum(losses) / len(losses)
        logger.info("epoch %d of %d: mean loss %.4f", epoch, epochs, mean)
        if progress is not None:
            progress(epoch, mean)
    return model.eval()


def accumulate_loss(
    model: GatedViewMoE, task: SourceTask, *, chunk_rows: int = 32, gate_entropy_weight: float = 0.0
) -> float:
    r"""Add the full-batch gradient of the loss to the parameters, a chunk of rows at a time; returns the loss.

    .. math:: L = \frac1n \sum_i (s_i - y_i)^2 + \lambda \frac1n \sum_i \sum_m g_{im} \log g_{im}

    Means over rows split exactly: each chunk weighs its share of the rows. The entropy term is ours: the paper's
    abstract speaks of entropy-regularised gating, its code has none, hence the default 0; a positive weight keeps one
    view from taking over.

    Args:
        model: accumulates into its gradients.
        task: profiles and labels.
        chunk_rows: rows at once, at least 1.
        gate_entropy_weight: lambda, at least 0.

    Raises:
        ValueError: a parameter outside its range.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    if gate_entropy_weight < 0:
        raise ValueError(f"gate_entropy_weight is {gate_entropy_weight}; it must be at least 0")
    rows = len(task.label_T)
    total = 0.0
    for profile_TEK, label_T in zip(torch.split(task.profile_TEK, chunk_rows), torch.split(task.label_T, chunk_rows)):
        out = model(profile_TEK)
        loss = (out.score_T - label_T.to(out.score_T.dtype)).square().sum() / rows
        if gate_entropy_weight:
            loss = loss - gate_entropy_weight * out.routing.entropy_T.sum() / rows
        loss.backward()
        total += float(loss.detach())
    return total


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
