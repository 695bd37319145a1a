"""Experts that a block finds by product keys and computes by itself, with no module for the router or the bank."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.models.adapters.bank import ForeignBank
from moesaic.models.adapters.exchange import Decide, Exchange, Produced
from moesaic.routing import Routing


class ProductKeys(Exchange):
    """A linear ``router_gate`` scores two halves of n keys; expert (i, j) has the logit ``first_i + second_j``.

    Nothing stands between choice and use, so the choice is read when the block is done, and another one replaces the
    routed part of its output: the dense part, which the block adds, is kept from the same call.
    """

    def attach(self, router: nn.Module, bank: nn.Module, block: nn.Module, decide: Decide) -> list[RemovableHandle]:
        """See :class:`Exchange`."""
        dense: dict[int, Tensor] = {}  # by thread: output of the block's dense MLP, until the block is done

        def remember(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            dense[threading.get_ident()] = output

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            beside = dense.pop(threading.get_ident())
            x = args[0] if args else kwargs["hidden_states"]
            decided = decide(x, lambda: _select(block, output[1]))
            if decided is None:
                return None
            _, weights_TK, ids_TK = decided[0]
            routed = _routed(block, x.reshape(-1, x.shape[-1]), ids_TK, weights_TK)
            return (beside + routed.view(beside.shape), *output[1:])

        down: Any = block.down_proj
        return [down.register_forward_hook(remember), block.register_forward_hook(after, with_kwargs=True)]

    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """See :class:`Exchange`."""
        return _select(block, router(x_TD).view(2, x_TD.shape[0], -1))

    def first(self, count: int, experts: int) -> list[int]:
        """See :class:`Exchange`."""
        keys, before = math.isqrt(count), math.isqrt(experts)
        return [first * before + second for first in range(keys) for second in range(keys)]

    def check_sources(self, name: str, sources: Sequence[int], experts: int) -> None:
        """See :class:`Exchange`: keys, not single experts, can be moved."""
        keys_of(name, sources, experts)


def _select(block: nn.Module, halves_2TN: Tensor) -> Produced:
    """The block's own choice from the scores of its two halves, by its own operations."""
    keys, top_k, experts = (int(getattr(block, name)) for name in ("num_keys", "top_k", "num_experts"))
    (first, second), (first_ids, second_ids) = halves_2TN.topk(keys, dim=-1)
    sums = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)
    ids = (first_ids.unsqueeze(-1) * keys + second_ids.unsqueeze(-2)).flatten(-2)
    scores_TK, places_TK = sums.topk(top_k, dim=-1)
    weights_TK = F.softmax(scores_TK, dim=-1)
    if bool(block.norm_topk_prob):
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    logits_TE = (halves_2TN[0].unsqueeze(-1) + halves_2TN[1].unsqueeze(-2)).flatten(-2)
    logits_TE = F.pad(logits_TE, (0, experts - keys * keys), value=-torch.inf)  # without a key, never chosen
    return logits_TE, weights_TK, ids.gather(-1, places_TK)


def _routed(block: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The block's sum over rank-one experts: act(key . x) * weight * value."""
    down_TKD, up_TKD = F.embedding(ids_TK, block.down_embed.weight), F.embedding(ids_TK, block.up_embed.weight)
    h_TK = block.act_fn(torch.matmul(down_TKD, x_TD[..., None]).squeeze(-1)) * weights_TK
    return torch.matmul(h_TK[:, None], up_TKD).squeeze(1)


class RankOneExperts(ForeignBank):
    """Two embeddings of the block: ``down_embed`` (E, D) takes the row in, ``up_embed`` (E, D) gives it out.

    Args:
        module: the block.
        name: its path.
    """

    has_gate = False

    def __init__(self, module: nn.Module, name: str) -> None:
        pair: Any = module
        experts, dim = pair.down_embed.weight.shape
        super().__init__(module, name, experts, dim, dim, 1)
        self.pair = pair

    def views(self) -> dict[str, Tensor]:
        """See :class:`ForeignBank`; F = 1."""
        return {"up": self.pair.down_embed.weight[:, None], "down": self.pair.up_embed.weight[:, :, None]}

    def stored(self) -> list[tuple[str, nn.Module, int]]:
        """See :class:`ForeignBank`."""
        return [("weight", self.pair.down_embed, 1), ("weight", self.pair.up_embed, 1)]

    def run(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """See :class:`ForeignBank`."""
        ids_TK = routing.expert_ids_TK.clamp(max=self.num_experts - 1)  # an empty slot has the weight 0
        return _routed(self.module, x_TD, ids_TK, routing.weights_TK.to(x_TD.dtype))


def keys_of(name: str, sources: Sequence[int], experts: int) -> list[int]:
    """The old key in each new place, for experts that are all pairs of keys.

    Args:
        name: of the layer, for the message.
        sources: old expert in each new place.
        experts: E before.

    Raises:
        ValueError: sources that are not the pairs of one list of keys, with what would do.
    """
    before, after = math.isqrt(experts), math.isqrt(len(sources))
    keys = [int(source) % before for source in sources[:after]]
    if list(sources) != [first * before + second for first in keys for second in keys]:
        pair = [i for i in range(before * before) if before - 1 in (i // before, i % before)]
        raise ValueError(
            f"layer {name} finds its {experts} experts by pairs of {before} keys: single experts cannot be moved or"
            f" dropped, only keys, each with all its pairs. Dropping the last key, for example, drops {pair}"
        )
    return keys
