"""The standard shell of MoE blocks: a router returns (logits, weights, ids) and a bank takes the last two."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.layers.intervention import Chooser
from moesaic.models.adapters.bank import ForeignBank
from moesaic.models.adapters.exchange import Exchange, RouterOutput
from moesaic.models.adapters.probe import Probe
from moesaic.models.adapters.rules import Rule
from moesaic.models.adapters.rules_beyond import SHARED
from moesaic.models.adapters.weights import fill_empty
from moesaic.routing import Context, Routing
from moesaic.routing.routing import mask_logits

_SCALE_NAME = re.compile(r"scaling_factor|route_scale|router_scale")


@dataclasses.dataclass(frozen=True, eq=False)
class Shell:
    """One MoE layer of a foreign model: its parts, and the translation between their tuples and a Routing.

    Args:
        name: path of the block.
        block: the module that holds router and bank.
        router: the router module.
        experts: the bank.
        found: what probing the router showed.
        output_site: the module whose output is the layer's: the block, or the bank where both hang on a decoder layer.
        exchange: where and in what form the choice passes from router to experts.
    """

    name: str
    block: nn.Module
    router: nn.Module
    experts: ForeignBank
    found: Probe
    output_site: nn.Module
    exchange: Exchange = dataclasses.field(default_factory=RouterOutput)

    @property
    def choices(self) -> int:
        """What a row can choose from: the experts, and behind them those that return their input, if there are such."""
        experts, width = self.experts.num_experts, self.found.width
        # A router that was seen to hand out ids beyond the bank's; older layouts store rows for these experts too.
        beyond = self.found.reach > experts or experts + self.experts.identities == width
        return width if beyond and width > experts else experts

    @property
    def skips(self) -> bool:
        """Whether the router may choose to skip the experts: a column of its logits that is no expert."""
        return self.found.width > self.choices

    @property
    def block_factor(self) -> float:
        """What the block multiplies the bank's output by; a Routing's weights include it."""
        names = inspect.unwrap(type(self.block).forward).__code__.co_names
        if self.output_site is not self.block:
            return 1.0
        rule = self.found.rule
        if rule is not None and rule.inverse_top_k and "num_experts" in names:
            return float(self.block.num_experts)  # type: ignore[arg-type]
        factor = 1.0
        for name in names:
            value = getattr(self.block, name, None)
            if _SCALE_NAME.search(name) and isinstance(value, int | float):
                factor *= float(value)
        return factor

    def decode(self, output: Any, context: Context) -> Routing:
        """The router's output as a Routing: padded rows emptied, the block's factor included.

        Raises:
            RuntimeError: an output that is not (logits, weights, ids, ...), or holds weights that are not finite.
        """
        self._check(output)
        full_TE = self.logits(output)
        ids_TK = output[2].reshape(full_TE.shape[0], -1).to(torch.int64)
        weights_TK = output[1].reshape(ids_TK.shape)
        if self.block_factor != 1.0:
            weights_TK = weights_TK * self.block_factor
        empty_TK = ids_TK >= self.choices
        if self.skips:  # a class that skips the experts is handed on as id 0 with weight 0
            empty_TK = empty_TK | (weights_TK == 0)
        mask_T = context.token_mask_T
        if mask_T is not None:
            empty_TK = empty_TK | ~mask_T[:, None]
        try:
            return Routing(
                ids_TK.masked_fill(empty_TK, self.choices),
                torch.where(empty_TK, weights_TK.new_zeros(()), weights_TK),
                self.choices,
                full_TE[:, : self.choices],
                mask_T,
                extras={
                    **self.exchange.beside(output, ids_TK, None),
                    **({} if self.found.rule is None else self.found.rule.beside(output)),
                },
                score_function=self.score_function,
            )
        except ValueError as error:
            raise RuntimeError(f"layer {self.name}: its router gave no valid routing: {error}") from error

    def encode(self, routing: Routing, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """``output`` with other ids and weights: empty slots made safe, padded rows left as the model had them.

        A padded row that the new routing fills is used as it says.
        """
        old_weights, old_ids = output[1], output[2]
        rows = routing.num_rows
        kept_TK = old_ids.reshape(rows, -1).to(torch.int64)
        if self.exchange.takes_empty and routing.slots:
            ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
        else:
            ids_TK, weights_TK = fill_empty(routing, kept_TK[:, 0])
        if self.block_factor != 1.0:
            weights_TK = weights_TK / self.block_factor
        weights_TK = weights_TK.to(old_weights.dtype)
        if routing.token_mask_T is not None:
            untouched_T = ~routing.token_mask_T & (routing.active_T == 0)
            width = max(ids_TK.shape[1], kept_TK.shape[1])
            first = kept_TK[:, :1]
            ids_TK = torch.where(
                untouched_T[:, None], _widen(kept_TK, width, first), _widen(ids_TK, width, ids_TK[:, :1])
            )
            kept_weights = old_weights.reshape(rows, -1)
            weights_TK = torch.where(untouched_T[:, None], _widen(kept_weights, width), _widen(weights_TK, width))
        if ids_TK.shape[1] == 1 and kept_TK.shape[1] > 1 and not hasattr(self.experts.module, "is_transposed"):
            # A bank outside transformers' interface may squeeze an axis of one slot away (longcat_flash does).
            ids_TK, weights_TK = _widen(ids_TK, 2, ids_TK), _widen(weights_TK, 2)
        shape = (*old_ids.shape[:-1], ids_TK.shape[1])
        rest = output[3:]
        shared = routing.extras.get(SHARED)
        if shared is not None and rest and isinstance(rest[0], Tensor) and shared.numel() == rest[0].numel():
            given = shared.to(rest[0].dtype).reshape(rest[0].shape)
            if routing.token_mask_T is not None:
                given = torch.where(untouched_T.view(*rest[0].shape[:-1], 1), rest[0], given)
            rest = (given, *rest[1:])
        return (output[0], weights_TK.reshape(shape), ids_TK.to(old_ids.dtype).reshape(shape), *rest)

    def logits(self, output: tuple[Any, ...]) -> Tensor:
        """All columns of the router's first output as logits (T, at least E)."""
        if self.found.rule is not None:
            return self.found.rule.full_logits(output)
        first: Tensor = output[0].reshape(-1, output[0].shape[-1])
        return first

    @property
    def score_function(self) -> str:
        """How logits become probabilities, as a Routing names it."""
        return "softmax" if self.found.rule is None else self.found.rule.score_function

    @property
    def rule(self) -> Rule:
        """The rule.

        Raises:
            ValueError: none reproduces the router.
        """
        if self.found.rule is None:
            raise ValueError(f"layer {self.name}: another choice cannot be weighed: {self.found.reason}")
        return self.found.rule

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weights of a choice by the model's own rule, the block's factor included.

        Args:
            logits_TE: all columns of the router's logits.
            ids_TK: (T, K) ids, E in empty slots.
        """
        narrow = torch.where(ids_TK < self.choices, ids_TK, logits_TE.shape[1])  # empty: beyond every column
        weights = self.rule.weigh(self.router, self.block, _float(logits_TE), narrow)
        return weights * self.block_factor if self.block_factor != 1.0 else weights

    def choose(self, logits_TE: Tensor, allowed_TE: Tensor | None = None, k: int | None = None) -> Tensor:
        """The model's own choice (T, K), restricted to ``allowed_TE`` (T, E); E where too few are allowed.

        Raises:
            ValueError: the way of choosing was not reproduced.
        """
        selection = self.rule.selection
        if selection is None:
            raise ValueError(
                f"layer {self.name}: the model's own selection was not reproduced, so it cannot be"
                " restricted; give ids_TK"
            )
        if allowed_TE is not None:
            allowed_TE = self._all_columns(allowed_TE, logits_TE)
        k = self.found.top_k if k is None else k
        # A column that skips the experts takes part in the choice, those of shared experts do not.
        columns = logits_TE.shape[1] if self.skips else self.choices
        logits_TE, allowed_TE = logits_TE[:, :columns], None if allowed_TE is None else allowed_TE[:, :columns]
        return selection.choose(self.router, self.block, _float(logits_TE), k, allowed_TE).clamp(max=self.choices)

    def restrict(self, logits_TE: Tensor, allowed_TE: Tensor) -> Tensor:
        """The logits of a model without the experts outside ``allowed_TE`` (T, E): -inf in their columns."""
        some_T1 = allowed_TE.any(1, keepdim=True)  # a row in which nothing is allowed stays as it was
        return mask_logits(logits_TE, self._all_columns(allowed_TE | ~some_T1, logits_TE))

    def _all_columns(self, allowed_TE: Tensor, logits_TE: Tensor) -> Tensor:
        """``allowed_TE`` with the router's columns beyond the experts (a class that skips them), always allowed."""
        extra = logits_TE.shape[1] - allowed_TE.shape[1]
        return torch.cat([allowed_TE, allowed_TE.new_ones((allowed_TE.shape[0], extra))], 1) if extra else allowed_TE

    def chooser(self, output: tuple[Any, ...], context: Context) -> Chooser:
        """What ``call.choose`` does here."""

        def choose(ids_TK: Tensor | None, allowed_TE: Tensor | None, keep_scores: bool) -> Routing:
            logits_TE = self.logits(output)
            if allowed_TE is not None and not keep_scores:
                logits_TE = self.restrict(logits_TE, allowed_TE)
            if ids_TK is None:
                ids_TK = self.choose(logits_TE, allowed_TE, output[2].shape[-1])
                ids_TK = self.exchange.limit(self.router, logits_TE, ids_TK, output)
            elif ids_TK.numel() and (int(ids_TK.min()) < 0 or int(ids_TK.max()) > self.choices):
                raise ValueError(
                    f"ids_TK must lie in 0..{self.choices - 1}, or be {self.choices} for an empty slot;"
                    f" got {int(ids_TK.min())}..{int(ids_TK.max())}"
                )
            if context.token_mask_T is not None:
                ids_TK = ids_TK.masked_fill(~context.token_mask_T[:, None], self.choices)
            weights_TK = self.weigh(logits_TE, ids_TK).to(output[1].dtype)
            return Routing(
                ids_TK,
                weights_TK,
                self.choices,
                logits_TE[:, : self.choices],
                context.token_mask_T,
                extras={
                    **self.exchange.beside(output, ids_TK, allowed_TE),
                    **self.rule.beside_choice(self.router, self.block, _float(logits_TE), ids_TK),
                },
                score_function=self.score_function,
            )

        return choose

    def _check(self, output: Any) -> None:
        fits = isinstance(output, tuple) and len(output) >= 3 and all(isinstance(item, Tensor) for item in output[:3])
        if not fits or output[2].dtype.is_floating_point or output[1].shape != output[2].shape:
            raise RuntimeError(
                f"layer {self.name}: its router {type(self.router).__name__} did not return (logits, weights, ids)"
                " as the standard shell does; this structure is not supported"
            )


def _float(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _widen(values_TK: Tensor, width: int, fill_T1: Tensor | None = None) -> Tensor:
    """``values_TK`` with more columns: 0, or the one column ``fill_T1`` repeated."""
    missing = width - values_TK.shape[1]
    if missing == 0:
        return values_TK
    fill = values_TK.new_zeros((values_TK.shape[0], 1)) if fill_T1 is None else fill_T1
    return torch.cat([values_TK, fill.expand(-1, missing)], 1)
