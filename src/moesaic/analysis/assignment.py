"""What an assignment of rows to experts says: how even it is, and how much it knows about a label."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.routing import Routing


def load_entropy(load_E: Tensor) -> float:
    """Entropy of the load divided by log E: 1 where all experts get the same, 0 where one gets all (and for E = 1).

    Args:
        load_E: (E,) counts.
    """
    if load_E.numel() < 2:
        return 0.0
    share_E = load_E.double() / load_E.sum().clamp(min=1)
    return float(torch.special.entr(share_E).sum()) / math.log(load_E.numel())


def load_cv(load_E: Tensor) -> float:
    """Coefficient of variation of the load: population standard deviation over mean; 0 without any load."""
    load_E = load_E.double()
    mean = float(load_E.mean())
    return float(load_E.std(correction=0)) / mean if mean > 0 else 0.0


def mutual_information(routing: Routing, label_T: Tensor) -> float:
    r"""Mutual information between expert and label over all assignments, in nats.

    .. math:: I = \sum_{e, c} q_{e,c} \log \frac{q_{e,c}}{q_e \, q_c}

    with :math:`q_{e,c}` the share of assignments that send a row of label c to expert e. It is estimated by counting,
    so it is biased upwards by about :math:`(E - 1)(C - 1) / 2N` for N assignments.

    Args:
        routing: the decisions.
        label_T: (T,) int64 labels from 0 on, such as the source that a row comes from.

    Raises:
        ValueError: labels of another length or kind.
    """
    if label_T.shape != (routing.num_rows,) or label_T.dtype != torch.int64:
        raise ValueError(f"label_T must be int64 of shape ({routing.num_rows},), got {label_T.dtype} {label_T.shape}")
    if not routing.num_rows or bool((label_T < 0).any()):
        raise ValueError("label_T must hold at least one label, all of them >= 0")
    labels, experts = int(label_T.max()) + 1, routing.num_experts
    pair_TK = label_T[:, None] * (experts + 1) + routing.expert_ids_TK
    counts = torch.bincount(pair_TK.reshape(-1), minlength=labels * (experts + 1)).double()
    joint_CE = counts.view(labels, experts + 1)[:, :experts]
    joint_CE = joint_CE / joint_CE.sum().clamp(min=1)
    entropies = [torch.special.entr(part).sum() for part in (joint_CE.sum(0), joint_CE.sum(1), joint_CE)]
    return max(float(entropies[0] + entropies[1] - entropies[2]), 0.0)


def routing_metrics(routing: Routing, label_T: Tensor | None = None) -> dict[str, float]:
    """Normalised load entropy, coefficient of variation of the load and, with labels, mutual information.

    Args:
        routing: the decisions.
        label_T: see :func:`mutual_information`.
    """
    found = {"load_entropy": load_entropy(routing.load_E), "load_cv": load_cv(routing.load_E)}
    if label_T is not None:
        found["mutual_information"] = mutual_information(routing, label_T)
    return found
