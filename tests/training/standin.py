"""A small causal language model with MoE layers, built of the parts only: what the trainer may rely on, and no more."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.data.packing import PackedTokens
from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.losses import BalanceLoss
from moesaic.routing import Context, Routing, TopKRouter
from moesaic.training import TextData

DIM = 16


class Block(nn.Module):
    """Causal average of the past, then an MoE or a dense layer."""

    def __init__(self, ffn: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.ffn = ffn
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, context: Context) -> tuple[Tensor, Routing | None]:
        past = x_BSD.cumsum(1) / torch.arange(1, x_BSD.shape[1] + 1, device=x_BSD.device)[:, None]
        x_BSD = x_BSD + self.dropout(self.mix(self.norm(past)))
        if isinstance(self.ffn, MoE):
            y_BSD, routing = self.ffn(self.norm(x_BSD), context)
            return x_BSD + y_BSD, routing
        return x_BSD + self.ffn(self.norm(x_BSD)), None


class StandIn(nn.Module):
    def __init__(self, vocab: int = 27, layers: tuple[str, ...] = ("moe", "moe"), dropout: float = 0.0, **moe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(
            Block(make_moe(**moe) if kind == "moe" else make_moe() if kind == "plain" else dense(), dropout)
            for kind in layers
        )
        self.head = nn.Linear(DIM, vocab, bias=False)
        self.recompute = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        self.recompute = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, output_routings: bool = False):
        batch, length = input_ids.shape
        context = Context.from_mask(attention_mask, batch, length)
        x_BSD, routings = self.embedding(input_ids), []
        for block in self.blocks:
            if self.recompute and self.training:
                x_BSD, routing = checkpoint(block, x_BSD, context, use_reentrant=False)
            else:
                x_BSD, routing = block(x_BSD, context)
            if routing is not None:
                routings.append(routing)
        return SimpleNamespace(logits=self.head(x_BSD), routings=tuple(routings) if output_routings else None)


def make_moe(*, coefficient: float = 0.01, experts: nn.Module | None = None, **selection) -> MoE:
    bank = FFNExperts(DIM, 16, 4) if experts is None else experts
    losses = [BalanceLoss(coefficient)]
    return MoE(bank, TopKRouter(DIM, 4, 2, **selection), losses=losses)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))


def model(seed: int = 0, **options) -> StandIn:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return StandIn(**options)


def data(tokens: int = 2000, seed: int = 0, vocab: int = 27) -> TextData:
    """A stream with structure to learn: each token mostly follows from the one before."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(0, vocab, (tokens,), generator=generator)
    keep = torch.rand(tokens, generator=generator) < 0.8
    stream = [0]
    for index in range(1, tokens):
        stream.append((stream[-1] * 7 + 3) % vocab if keep[index] else int(noise[index]))
    ids = torch.tensor(stream)
    cut = tokens * 9 // 10
    return TextData(PackedTokens(ids[:cut], seed=seed), ids[cut:])


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens[None, :-1]).logits
    return F.cross_entropy(logits[0], tokens[1:])
