"""What a family's own parts hand over, read by hooks of the test's own and not through the code under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.models.handle import MoELayer
from tests.models.families import Family


def watch(family: Family, layer: MoELayer, seen: list[Tensor]) -> list[Any]:
    """Hooks that append the dense weights (T, E) of every choice of ``layer`` to ``seen``; remove them afterwards."""
    block, choices = layer.module, family.choices

    def dense(ids: Tensor, weights: Tensor) -> None:
        ids, weights = ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, weights.shape[-1])
        seen.append(weights.new_zeros((len(ids), choices)).scatter_add(1, ids, weights))

    def of_router(module: Any, args: Any, out: Any) -> None:
        if family.form == "stacked":
            dense(out[2], out[1])
        elif family.form == "dense scores":
            seen.append(out[0])
        elif family.form == "two masks":
            seen.append(out[1])
        elif family.form == "one-hot slots":
            seen.append((out[0] * out[1]).reshape(-1, choices))
        elif family.form == "sorted rows":
            _, rows, weights, counts, logits = out
            expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            table = weights.new_zeros((len(logits), choices))
            table[rows, expert] = weights
            seen.append(table)

    if family.form == "block selects":
        return [block.experts.register_forward_pre_hook(lambda m, args: dense(args[1], args[2]))]
    if family.form == "product keys":
        ids: list[Tensor] = []

        def weigh(module: Any, args: Any, out: Any) -> None:
            chosen = ids.pop()
            first, second = out[1]
            logits = first.gather(1, chosen // 4) + second.gather(1, chosen % 4)
            dense(chosen, logits.softmax(-1))

        return [
            block.down_embed.register_forward_pre_hook(lambda m, args: ids.append(args[0])),
            block.register_forward_hook(weigh),
        ]
    return [block.get_submodule(_name(layer)).register_forward_hook(of_router)]


def _name(layer: MoELayer) -> str:
    return next(name for name, module in layer.module.named_modules() if module is layer.shell.router)
