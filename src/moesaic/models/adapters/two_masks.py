"""NLLB-MoE: two choices a token as masks, and a bank that, as released, runs its experts 0 and 1 whatever they say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.adapters.exchange import Produced
from moesaic.models.adapters.exchange_bank import BankInput
from moesaic.routing import Routing

OWN = "own_choice"
SERVED = "served_by"


class TwoMasks(BankInput):
    """The router returns (mask of the first choice (T, E), weights (T, E), logits); experts take (x, mask, weights).

    The bank encodes the mask once more, so expert 1 serves every first choice and expert 0 every second one. That is
    what released models compute and what stays: a row that keeps the model's own choice is computed so, bit by bit. A
    row that is given another choice is computed by the experts that it names. A Routing carries the own choice in
    ``extras["own_choice"]`` and the experts that serve its slots in ``extras["served_by"]``, both (T, 2).
    """

    takes_empty = True

    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """See :class:`Exchange`."""
        return self.read(router(x_TD, **more), ())

    def read(self, output: Any, args: tuple[Any, ...]) -> Produced:
        """See :class:`BankInput`; slot 0 is the first choice."""
        mask_TE, gates_TE, logits_TE = output
        experts = int(gates_TE.shape[-1])
        first_T1 = mask_TE.argmax(-1, keepdim=True)
        has_T1 = mask_TE.any(-1, keepdim=True)
        rest_TE = torch.where(has_T1 & (mask_TE != 0), 0.0, gates_TE)
        second = rest_TE.max(-1, keepdim=True)
        ids_TK = torch.cat(
            [first_T1.masked_fill(~has_T1, experts), second.indices.masked_fill(second.values <= 0, experts)], 1
        )
        first_weight = gates_TE.gather(1, first_T1).masked_fill(~has_T1, 0.0)
        return logits_TE, torch.cat([first_weight, second.values], 1), ids_TK

    def write(self, produced: Produced, routing: Routing, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`BankInput`; the bank takes ids in place of its mask."""
        x_TD, _, gates_TE = args
        experts = int(gates_TE.shape[-1])
        ids_TK, weights_TK = _filled_first(produced[2], produced[1], experts)
        own_TK, served_TK = routing.extras.get(OWN), routing.extras.get(SERVED)
        if own_TK is not None and served_TK is not None:
            own_TK, served_TK = _filled_first(own_TK, served_TK, experts)
            missing = max(own_TK.shape[1] - ids_TK.shape[1], 0)
            ids_TK = nn.functional.pad(ids_TK, (0, missing), value=experts)
            weights_TK = nn.functional.pad(weights_TK, (0, missing))
            more = ids_TK.shape[1] - own_TK.shape[1]
            own_TK = nn.functional.pad(own_TK, (0, more), value=experts)
            served_TK = nn.functional.pad(served_TK, (0, more), value=experts)
            ids_TK = torch.where((own_TK == ids_TK).all(1, keepdim=True), served_TK, ids_TK)
        empty_TK = (ids_TK >= experts) | (weights_TK == 0)
        spare_T1 = ids_TK.masked_fill(empty_TK, experts).amin(1, keepdim=True)
        spare_T1 = torch.where(spare_T1 < experts, spare_T1, served_TK[:, :1] if served_TK is not None else 0)
        return x_TD, torch.where(empty_TK, spare_T1, ids_TK), weights_TK.to(gates_TE.dtype)

    def beside(self, produced: Produced, ids_TK: Tensor, allowed_TE: Tensor | None) -> dict[str, Tensor]:
        """See :class:`Exchange`: the model without the others would count its first two experts among the allowed."""
        rows = ids_TK.shape[0]
        if allowed_TE is None:
            own_TK = produced[2]
            served_TK = own_TK.new_tensor([[1, 0]]).expand(rows, -1)
        else:
            own_TK = ids_TK
            first = (~allowed_TE).to(torch.int8).argsort(dim=1, stable=True)[:, :2]
            served_TK = first.flip(1)
        return {OWN: own_TK, SERVED: served_TK}

    def limit(self, router: nn.Module, logits_TE: Tensor, ids_TK: Tensor, produced: Produced) -> Tensor:
        """See :class:`Exchange`: the model's own capacity."""
        experts = int(logits_TE.shape[1])
        real_TK = ids_TK.clamp(max=experts - 1)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, real_TK, True)
        least_T1 = logits_TE.gather(1, real_TK).masked_fill(ids_TK >= experts, torch.inf).amin(1, keepdim=True)
        passed_over_TE = ~chosen_TE & (logits_TE > least_T1)  # not allowed: the router must pass them over too
        route: Any = router.route_tokens
        _, gates_TE = route(logits_TE.masked_fill(passed_over_TE, -torch.inf), logits_TE.dtype)
        free_TK = gates_TE.gather(1, real_TK) > 0
        return ids_TK.masked_fill(~free_TK, experts)

    def check_sources(self, name: str, sources: Any, experts: int) -> None:
        """See :class:`Exchange`."""
        # A drop moves the next ones into the places 0 and 1, and so does a mask here.
        order = list(sources)
        if order != sorted(order) and order[:2] != [0, 1]:
            raise ValueError(
                f"layer {name}: the bank of this family runs the experts in the places 0 and 1 whatever the router"
                " says (a fault of the released code), so these two must keep their places: leave them first"
            )


def _filled_first(ids_TK: Tensor, values_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Both with the filled slots in front, in their order."""
    order_TK = (ids_TK >= experts).to(torch.int8).argsort(dim=1, stable=True)
    return ids_TK.gather(1, order_TK), values_TK.gather(1, order_TK)
