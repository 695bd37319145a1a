"""Blocks whose choice is complete only when the experts are called: it is read and replaced there."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.models.adapters.exchange import Decide, Exchange, Produced


class BankInput(Exchange):
    """The router's output is remembered, and the choice exchanged in the arguments of the experts' call."""

    def attach(self, router: nn.Module, bank: nn.Module, block: nn.Module, decide: Decide) -> list[RemovableHandle]:
        """See :class:`Exchange`."""
        returned: dict[int, Any] = {}  # by thread: what the router gave, until the bank is called

        def remember(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            returned[threading.get_ident()] = output

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            output = returned.pop(threading.get_ident(), None)
            if output is None:  # the bank is run by itself, not by its block
                return None
            decided = decide(args[0], lambda: self.read(output, args))
            if decided is None:
                return None
            return self.write(*decided, args)

        return [router.register_forward_hook(remember), bank.register_forward_pre_hook(before)]

    @abstractmethod
    def read(self, output: Any, args: tuple[Any, ...]) -> Produced:
        """The choice in the common form, from what the router returned and what the bank is called with."""

    @abstractmethod
    def write(self, produced: Produced, routing: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the bank's call for another choice."""


class BlockSelects(BankInput):
    """The router returns logits, the block's ``route_tokens_to_experts`` chooses, experts take (x, ids, weights)."""

    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """See :class:`Exchange`."""
        logits_TE = router(x_TD, **more)
        select: Any = block.route_tokens_to_experts
        weights_TK, ids_TK = select(logits_TE)
        return logits_TE, weights_TK, ids_TK

    def read(self, output: Any, args: tuple[Any, ...]) -> Produced:
        """See :class:`BankInput`."""
        return output, args[2], args[1]

    def write(self, produced: Produced, routing: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`BankInput`."""
        return (args[0], produced[2], produced[1], *args[3:])


class OneHotSlots(BankInput):
    """The router returns (mask (B, S, E), weight (B, S, 1), logits); experts take (x, mask (T, K, E), weights (T, K)).

    Each sequence fills an expert up to the router's ``expert_capacity``; a token that comes later has an empty slot.
    """

    takes_empty = True

    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """See :class:`Exchange`; the rows are one sequence."""
        return self.read(router(x_TD[None], **more), ())

    def read(self, output: Any, args: tuple[Any, ...]) -> Produced:
        """See :class:`BankInput`."""
        mask_BSE, weights_BS1, logits_BSE = output
        chosen_BS1 = mask_BSE.any(-1, keepdim=True)
        ids_BS1 = mask_BSE.to(torch.int8).argmax(-1, keepdim=True).masked_fill(~chosen_BS1, mask_BSE.shape[-1])
        return logits_BSE, weights_BS1.masked_fill(~chosen_BS1, 0.0), ids_BS1

    def write(self, produced: Produced, routing: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`BankInput`."""
        x_TD, mask_T1E, weights_T1 = args
        experts = int(mask_T1E.shape[-1])
        ids_TK = produced[2].reshape(x_TD.shape[0], -1)
        mask_TKE = nn.functional.one_hot(ids_TK, experts + 1)[..., :experts].to(mask_T1E.dtype)
        return x_TD, mask_TKE, produced[1].reshape(ids_TK.shape).to(weights_T1.dtype)

    def limit(self, router: nn.Module, logits_TE: Tensor, ids_TK: Tensor, produced: Produced) -> Tensor:
        """See :class:`Exchange`: the model's own capacity, sequence by sequence."""
        batch, length, experts = (int(size) for size in produced[0].shape)
        ids_BSK = ids_TK.view(batch, length, -1)
        mask_BSE = nn.functional.one_hot(ids_BSK, experts + 1).amax(2)[..., :experts]
        place_BSE = mask_BSE.cumsum(1) * mask_BSE
        full_BSE = nn.functional.pad(place_BSE > int(router.expert_capacity), (0, 1))  # type: ignore[arg-type]
        return ids_BSK.masked_fill(full_BSE.gather(2, ids_BSK), experts).view(ids_TK.shape)
