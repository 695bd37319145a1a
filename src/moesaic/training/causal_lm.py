"""Causal language modelling on packed text: one task among others."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.data.packing import Batch, PackedTokens
from moesaic.layers import collect_routings
from moesaic.routing import Context
from moesaic.training.config import TrainConfig
from moesaic.training.task import Evaluation, Step, Task, TaskLoss, auxiliary_loss
from moesaic.training.text_data import TextData


class CausalLM(Task[Batch]):
    """Next-token prediction for any transformers-like causal model.

    The loss is formed here and not in the model, so that it can be divided by the targets of the whole step. A model of
    ours returns its routings, whose losses are the auxiliary loss; so do layers of ours inside a model of transformers
    (:class:`moesaic.layers.BareMoE`). Other models train without one.

    Args:
        data: tokens to train on and to evaluate with.
    """

    unit = "tokens"
    loss_unit = "nats per token"

    def __init__(self, data: TextData) -> None:
        self.data = data

    def check(self, config: TrainConfig) -> None:
        """Refuse a text shorter than a window of any stage.

        Raises:
            ValueError: with both lengths.
        """
        for stage in config.all_stages():
            self.data.train.windows(stage.length)

    def batches(self, step: Step) -> Sequence[Batch]:
        """Shuffled windows; their order follows from seed, stage and number."""
        return [
            self.data.train.batch(step.first + i, step.shape.batch, step.shape.length, stage=step.stage)
            for i in range(step.micro_batches)
        ]

    def count(self, batch: Batch) -> int:
        """Targets that count."""
        return batch.num_targets

    def loss(self, model: nn.Module, batch: Batch) -> TaskLoss:
        """See :func:`causal_lm_loss`."""
        return causal_lm_loss(model, batch)

    def evaluate(self, model: nn.Module, config: TrainConfig) -> Evaluation | None:
        """Loss on the held-out part, each token once."""
        if self.data.eval_tokens is None:
            return None
        stage = config.all_stages()[-1]
        found = evaluate_tokens(
            model, self.data.eval_tokens, length=stage.length, batch=stage.batch, most_batches=config.eval_batches
        )
        if self.data.tokens_per_character is None:
            return found
        return Evaluation(found.loss, found.count, {"loss_per_character": found.loss * self.data.tokens_per_character})

    def fingerprint(self) -> str:
        """Digest of the training tokens."""
        return data_fingerprint(self.data.train)

    def describe(self, folder: Path) -> None:
        """Write the tokenizer."""
        if self.data.tokenizer is not None:
            self.data.tokenizer.save(folder / "tokenizer.json")


def causal_lm_loss(model: nn.Module, batch: Batch) -> TaskLoss:
    """Summed negative log-likelihood of the targets, in nats.

    Args:
        model: ``model(input_ids=..., attention_mask=...)`` with ``.logits`` (B, S, V).
        batch: inputs and the tokens that follow them.
    """
    arguments: dict[str, object] = {"input_ids": batch.inputs_BS}
    if batch.mask_BS is not None:
        arguments["attention_mask"] = batch.mask_BS
    accepted = _accepted(model)
    if "output_routings" in accepted:
        arguments["output_routings"] = True
    if "use_cache" in accepted:
        arguments["use_cache"] = False
    batch_size, length = batch.inputs_BS.shape
    context = Context.from_mask(batch.mask_BS, batch_size, length, device=batch.inputs_BS.device)
    with collect_routings(context) as inside:  # of layers of ours in a model that passes no routings on
        output = model(**arguments)
    logits_TV = output.logits.flatten(0, 1).float()
    total = F.cross_entropy(logits_TV, batch.targets_BS.reshape(-1), ignore_index=-100, reduction="sum")
    routings = tuple(getattr(output, "routings", None) or inside.routings)
    given = getattr(output, "aux_loss", None)
    return TaskLoss(total, given if isinstance(given, Tensor) else auxiliary_loss(routings), routings)


@torch.no_grad()
def evaluate_tokens(
    model: nn.Module,
    tokens: Tensor,
    *,
    length: int,
    stride: int | None = None,
    batch: int = 32,
    most_batches: int = 0,
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
        for number, piece in enumerate(_windows(tokens, length, stride, batch)):
            if most_batches and number >= most_batches:
                break
            total += float(causal_lm_loss(model, piece.to(device)).total)
            count += piece.num_targets
    finally:
        model.train(was_training)
    return Evaluation(total / count, count)


def data_fingerprint(tokens: PackedTokens) -> str:
    """Short digest of a token stream."""
    return hashlib.blake2b(tokens.tokens.numpy().tobytes(), digest_size=8).hexdigest()


def _windows(tokens: Tensor, length: int, stride: int, size: int) -> Iterator[Batch]:
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


def _accepted(model: nn.Module) -> frozenset[str]:
    """Argument names of a model's forward (of the model inside, when it is compiled)."""
    inner = getattr(model, "_orig_mod", model)
    return frozenset(inspect.signature(inner.forward).parameters)
