"""Where the choice passes from router to experts inside a block, and in what form: one class for each structure.

Everything else about a foreign layer (its rule, padding, empty slots, scale factors) is the same for all structures and
speaks of one form, :data:`Produced`. An exchange translates between that and what the family's own parts hand over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moesaic.routing import Routing

Produced = tuple[Any, ...]
"""(logits, weights, ids, ...): logits (..., E or more), weights and ids (..., K); what else the router returned."""

Decide = Callable[[Tensor, Callable[[], Produced]], "tuple[Produced, Routing] | None"]
"""Given the router's input and a way to read its choice: another choice and its Routing, or None to leave it."""


class Exchange(ABC):
    """The contract of a structure. Instances hold no state of a model: the parts are passed in."""

    takes_empty = False
    """Whether :meth:`write` takes the id E in an empty slot; else an expert of the row stands there, with weight 0."""

    @abstractmethod
    def attach(self, router: nn.Module, bank: nn.Module, block: nn.Module, decide: Decide) -> list[RemovableHandle]:
        """Hooks that ask ``decide`` between the router's choice and its use, and put another choice in its place.

        Args:
            router: the router.
            bank: the module of the experts.
            block: the module that holds both.
            decide: asked once a call.
        """

    @abstractmethod
    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """What ``router`` chooses for ``x_TD`` (T, D), run outside its model (perhaps a copy of the block's router)."""

    def limit(self, router: nn.Module, logits_TE: Tensor, ids_TK: Tensor, produced: Produced) -> Tensor:
        """``ids_TK`` with E where the model itself would leave the slot empty (an expert that is full)."""
        return ids_TK

    def beside(self, produced: Produced, ids_TK: Tensor, allowed_TE: Tensor | None) -> dict[str, Tensor]:
        """What a Routing of this structure carries in its ``extras``; nothing for most.

        Args:
            produced: the router's own choice.
            ids_TK: the choice that the Routing holds.
            allowed_TE: experts that the model is thought to consist of, or None for all.
        """
        return {}

    def first(self, count: int, experts: int) -> list[int]:
        """``count`` of E experts that the structure can keep, to bring a new model to that size."""
        return list(range(count))

    def check_sources(self, name: str, sources: Sequence[int], experts: int) -> None:
        """Refuse a rearrangement of experts that the structure cannot express.

        Args:
            name: of the layer.
            sources: old expert in each new place.
            experts: E before.

        Raises:
            ValueError: with the reason, and what would do.
        """
        return None


class RouterOutput(Exchange):
    """The router returns (logits, weights, ids, ...) and the block hands the last two on: most families."""

    def attach(self, router: nn.Module, bank: nn.Module, block: nn.Module, decide: Decide) -> list[RemovableHandle]:
        """See :class:`Exchange`."""

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = args[0] if args else next(iter(kwargs.values()))
            decided = decide(x, lambda: self.read(module, output))
            return None if decided is None else self.write(decided[0], output)

        return [router.register_forward_hook(after, with_kwargs=True)]

    def alone(self, router: nn.Module, block: nn.Module, x_TD: Tensor, **more: Any) -> Produced:
        """See :class:`Exchange`."""
        return self.read(router, router(x_TD, **more))

    def read(self, router: nn.Module, output: Any) -> Produced:
        """The router's output in the common form."""
        return output  # type: ignore[no-any-return]

    def write(self, produced: Produced, output: Any) -> Any:
        """What the router returns instead of ``output``."""
        return produced


class DenseScores(RouterOutput):
    """The router returns (scores (T, E), logits): 0 for what is not chosen; every expert sees its score times the row.

    All experts run on all rows. The same expert twice in a row of a Routing gets the sum of its weights.
    """

    def read(self, router: nn.Module, output: Any) -> Produced:
        """See :class:`RouterOutput`; the chosen are the router's ``top_k`` largest logits."""
        scores_TE, logits_TE = output
        ids_TK = logits_TE.topk(int(router.top_k), dim=1).indices  # type: ignore[arg-type]
        return logits_TE, scores_TE.gather(1, ids_TK), ids_TK

    def write(self, produced: Produced, output: Any) -> Any:
        """See :class:`RouterOutput`."""
        scores_TE, logits_TE = output
        weights_TK, ids_TK = produced[1], produced[2]
        return torch.zeros_like(scores_TE).scatter_add(1, ids_TK, weights_TK.to(scores_TE.dtype)), logits_TE


class SortedRows(RouterOutput):
    """The router returns (order, row, weight, experts' counts as a list, logits): the T * K choices sorted by expert.

    Args:
        slots: how many slots a row has, where the block is built for that number (experts of an attention, each slot
            with queries of its own); None where any number will do.
    """

    takes_empty = True

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots

    def read(self, router: nn.Module, output: Any) -> Produced:
        """See :class:`RouterOutput`."""
        order_N, _, weights_N, counts, logits_TE = output
        rows = int(logits_TE.shape[0])
        expert_N = torch.repeat_interleave(
            torch.arange(len(counts), device=order_N.device), torch.tensor(counts, device=order_N.device)
        )
        ids = torch.empty_like(order_N).scatter(0, order_N, expert_N)
        weights = torch.zeros_like(weights_N).scatter(0, order_N, weights_N)
        return logits_TE, weights.view(rows, -1), ids.view(rows, -1)

    def write(self, produced: Produced, output: Any) -> Any:
        """See :class:`RouterOutput`.

        Raises:
            ValueError: more slots than the block has.
        """
        weights_TK, ids_TK = produced[1], produced[2]
        experts = len(output[3])
        width = int(ids_TK.shape[1])
        if self.slots is not None and width != self.slots:
            used = int((ids_TK < experts).sum(1).max()) if ids_TK.numel() else 0
            if used > self.slots:
                raise ValueError(
                    f"a row uses {used} experts; experts of an attention take at most {self.slots}, its heads a slot"
                )
            first = (ids_TK >= experts).to(torch.int8).argsort(dim=1, stable=True)[:, : self.slots]
            ids_TK, weights_TK = ids_TK.gather(1, first), weights_TK.gather(1, first)
            missing = self.slots - ids_TK.shape[1]
            ids_TK = torch.nn.functional.pad(ids_TK, (0, missing), value=experts)
            weights_TK = torch.nn.functional.pad(weights_TK, (0, missing))
        flat_N = ids_TK.flatten()
        sorted_N, order_N = flat_N.sort(stable=True)
        order_N = order_N[: int((sorted_N < experts).sum())]
        counts = torch.bincount(flat_N, minlength=experts + 1)[:experts].tolist()
        row_N = order_N.div(max(ids_TK.shape[1], 1), rounding_mode="floor")
        return order_N, row_N, weights_TK.flatten()[order_N].to(output[2].dtype), counts, output[4]
