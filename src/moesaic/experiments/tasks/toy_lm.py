"""A transformer small enough to be trained hundreds of times, with an MoE in every block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.layers import MoE
from moesaic.routing import Context, Routing
from moesaic.training import Hook, Optimizers, Step, Task, TaskLoss, TrainConfig, Trainer
from moesaic.training.task import auxiliary_loss


class ToyLM(nn.Module):
    """Pre-norm causal transformer with learned positions: attention, then an MoE, in every block.

    Args:
        symbols: size of the alphabet.
        dim: D.
        heads: attention heads.
        context: longest sequence.
        moes: the MoE layer of each block.

    Shapes:
        ids (B, S) -> logits (B, S, symbols), and the routing of each block over the B * S rows.
    """

    def __init__(self, symbols: int, dim: int, heads: int, context: int, moes: Iterable[MoE]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, dim)
        self.position_SD = nn.Parameter(torch.empty(context, dim))
        self.blocks = nn.ModuleList(_Block(dim, heads, moe) for moe in moes)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, symbols, bias=False)
        for weight in (self.embedding.weight, self.position_SD, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        """Predict the next symbol at every position."""
        batch, length = ids_BS.shape
        context = Context.from_mask(None, batch, length, device=ids_BS.device)
        h_BSD = self.embedding(ids_BS) + self.position_SD[:length]
        routings = []
        for block in self.blocks:
            h_BSD, routing = block(h_BSD, context)
            routings.append(routing)
        return self.head(self.norm(h_BSD)), routings


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, moe: MoE) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.moe_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.moe = moe

    def forward(self, h_BSD: Tensor, context: Context) -> tuple[Tensor, Routing]:
        batch, length, dim = h_BSD.shape
        qkv = self.qkv(self.attention_norm(h_BSD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        h_BSD = h_BSD + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        y_BSD, routing = self.moe(self.moe_norm(h_BSD), context)
        return h_BSD + y_BSD, routing


def next_symbol_loss(logits: Tensor, ids_BS1: Tensor) -> Tensor:
    """Mean cross-entropy of predicting ``ids_BS1[:, 1:]``, in nats a symbol."""
    return F.cross_entropy(logits.flatten(0, 1), ids_BS1[:, 1:].flatten())


class NextSymbol(Task[Tensor]):
    """Next-symbol prediction with a :class:`ToyLM`.

    Args:
        draw: step -> (B, S + 1) ids; called once for each step, in order.
    """

    unit = "symbols"
    loss_unit = "nats per symbol"

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self.draw = draw

    def batches(self, step: Step) -> list[Tensor]:
        """One micro-batch."""
        return [self.draw(step.number)]

    def count(self, batch: Tensor) -> int:
        """Symbols that are predicted."""
        return batch[:, 1:].numel()

    def loss(self, model: nn.Module, batch: Tensor) -> TaskLoss:
        """Cross-entropy, and the losses of the routings."""
        logits, routings = model(batch[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        return TaskLoss(total, auxiliary_loss(routings), routings)

    def fingerprint(self) -> str:
        """Drawn as it goes; such a run is never resumed."""
        return "drawn"


class _Watch(Hook):
    name = "watch"

    def __init__(self, watch: Callable[[int, Sequence[Routing]], None]) -> None:
        self.watch = watch

    def before_step(self, trainer: Trainer, routings: Sequence[Routing]) -> None:
        self.watch(trainer.state.position.step, routings)


def train(
    model: ToyLM,
    batches: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    warmup: int = 0,
    cosine: bool = False,
    clip: float | None = None,
    watch: Callable[[int, Sequence[Routing]], None] | None = None,
) -> None:
    """AdamW on the cross-entropy plus the losses of the routings.

    Args:
        model: trained in place.
        batches: step -> (B, S + 1) ids.
        steps: optimizer steps.
        lr: peak learning rate.
        warmup: steps of linear warm-up.
        cosine: let the rate fall to a tenth after that, else it stays.
        clip: largest norm of the gradient.
        watch: called with the routings of every step before the parameters move.
    """

    def optimizers(model: nn.Module) -> Optimizers:
        named: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        return Optimizers({"adamw": torch.optim.AdamW(list(named), lr=lr)}, named)

    Trainer(
        model,
        NextSymbol(batches),
        TrainConfig(steps=steps, clip=clip, log_every=steps),
        hooks=[] if watch is None else [_Watch(watch)],
        optimizers=optimizers,
        schedule=lambda progress, step: _schedule(step, steps, warmup, cosine),
    ).train()


@torch.no_grad()
def evaluate(model: ToyLM, ids_WS1: Tensor, batch: int) -> tuple[float, list[list[Routing]]]:
    """Mean loss over windows, and the routings of each batch: batch -> block -> routing.

    Args:
        model: put into eval mode.
        ids_WS1: (W, S + 1) windows.
        batch: windows at a time.
    """
    model.eval()
    total, routings = 0.0, []
    for part in torch.split(ids_WS1, batch):
        logits, found = model(part[:, :-1])
        total += float(next_symbol_loss(logits, part)) * len(part)
        routings.append(found)
    return total / len(ids_WS1), routings


def _schedule(step: int, steps: int, warmup: int, cosine: bool) -> float:
    if step < warmup:
        return (step + 1) / warmup
    if not cosine:
        return 1.0
    progress = (step - warmup) / max(steps - warmup, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
