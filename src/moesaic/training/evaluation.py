"""Loss of a causal model on held-out tokens, each token scored once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.data.packing import Batch
from moesaic.training.objective import Objective, causal_lm


@dataclass(frozen=True)
class Evaluation:
    """Result of :func:`evaluate_tokens`.

    Attributes:
        loss: mean negative log-likelihood in nats per token; auxiliary losses are no part of it.
        tokens: tokens scored.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate_tokens(
    model: nn.Module,
    tokens: Tensor,
    *,
    length: int,
    stride: int | None = None,
    batch: int = 32,
    most_batches: int = 0,
    objective: Objective = causal_lm,
) -> Evaluation:
    """Score every token after the first exactly once.

    Windows of ``length`` inputs start every ``stride`` tokens; each scores the targets that no earlier window has, so
    with ``stride=length // 2`` every token (but those of the first window) sees at least half a window before it.

    Args:
        model: put into evaluation mode and back.
        tokens: (N,) ids.
        length: inputs per window.
        stride: tokens between starts of windows; ``length`` by default.
        batch: windows per forward.
        most_batches: stop after so many; 0 for all.
        objective: gives the summed loss of a batch.

    Raises:
        ValueError: fewer than 2 tokens; a stride outside [1, length].
    """
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride must be between 1 and length = {length}, got {stride}")
    if tokens.dim() != 1 or tokens.shape[0] < 2:
        raise ValueError(f"tokens must have shape (N,) with N >= 2, got {tuple(tokens.shape)}")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for number, piece in enumerate(_batches(tokens, length, stride, batch)):
            if most_batches and number >= most_batches:
                break
            total += float(objective(model, piece.to(device)).lm_sum)
            count += piece.num_targets
    finally:
        model.train(was_training)
    return Evaluation(total / count, count)


def _batches(tokens: Tensor, length: int, stride: int, size: int) -> Iterator[Batch]:
    """Full windows in batches, then the shorter last one."""
    tokens = tokens.to("cpu", torch.int64)
    last = int(tokens.shape[0]) - 1  # targets are tokens 1 .. last
    full = max(0, (last - length) // stride + 1)
    starts = torch.arange(full) * stride
    offsets = torch.arange(length)
    for begin in range(0, full, size):
        starts_B = starts[begin : begin + size]
        index_BS = starts_B[:, None] + offsets
        targets_BS = tokens[index_BS + 1]
        if stride < length:
            again = (offsets < length - stride) & (starts_B[:, None] > 0)
            targets_BS = targets_BS.masked_fill(again, -100)
        yield Batch(tokens[index_BS], targets_BS, None, int((targets_BS != -100).sum()))
    scored = (full - 1) * stride + length if full else 0
    if scored < last:
        start = max(0, min(full * stride, last - 1))
        targets_1S = tokens[start + 1 : last + 1][None].clone()
        targets_1S[:, : scored - start] = -100
        yield Batch(tokens[start:last][None], targets_1S, None, last - scored)
