"""Routing traces: a model's decisions kept, cut, joined, and replayed through the one way to intervene."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moesaic.formats.trace import PassRows, TraceCall, TraceLayer, TraceReader, TraceWriter
from moesaic.layers.intervention import Call
from moesaic.models.handle import MoELayer
from moesaic.routing import Context, Routing


class RoutingTrace:
    """Who went where, call by call, as :func:`~moesaic.models.record.record_routing` wrote it.

    A loaded trace reads one shard at a time, whatever its length. Slices share its storage.

    Args:
        calls: in the order in which layers ran; any sequence.
        layers: of the traced model.
    """

    def __init__(self, calls: Sequence[TraceCall] | TraceReader, layers: Sequence[TraceLayer]) -> None:
        self._calls = calls
        self.layers = list(layers)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RoutingTrace:
        """Open a folder that ``record_routing(stream_to=folder)`` wrote, also after a kill.

        Raises:
            ValueError: no trace, a damaged one, or one of a newer format.
        """
        reader = TraceReader(folder)
        return cls(reader, reader.layers)

    @classmethod
    def from_ids(
        cls,
        ids_TLK: Tensor,
        num_experts: int,
        *,
        weights_TLK: Tensor | None = None,
        padding: int = -1,
        layers: Sequence[str] | None = None,
        phase: str = "unknown",
    ) -> RoutingTrace:
        """Import what serving engines give back with each request: an array (tokens, layers, slots) of expert ids.

        vLLM's ``routed_experts`` has this form. Their mark for an empty slot is turned into ours; tokens with only
        empty slots count as padding.

        Args:
            ids_TLK: (T, L, K) integers.
            num_experts: E.
            weights_TLK: (T, L, K) combine weights; equal shares of the filled slots by default.
            padding: their mark for an empty slot.
            layers: names of the L layers; ``layer 0`` ... by default.
            phase: of all calls.

        Raises:
            ValueError: another shape, an id that is neither an expert nor the mark.
        """
        if ids_TLK.dim() != 3 or ids_TLK.dtype.is_floating_point:
            raise ValueError(f"ids_TLK must be integers (T, L, K), got {ids_TLK.dtype} {tuple(ids_TLK.shape)}")
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        ids = ids_TLK.to(torch.int64)
        empty = ids == padding
        wrong = ids[~empty & ((ids < 0) | (ids >= num_experts))]
        if wrong.numel():
            raise ValueError(
                f"ids_TLK holds {int(wrong[0])}: ids must lie in 0..{num_experts - 1}, or be padding = {padding}"
            )
        if weights_TLK is None:
            weights_TLK = (~empty).float() / (~empty).sum(-1, keepdim=True).clamp(min=1)
        if weights_TLK.shape != ids.shape:
            raise ValueError(f"weights_TLK has shape {tuple(weights_TLK.shape)}, ids_TLK {tuple(ids.shape)}")
        names = [f"layer {i}" for i in range(ids.shape[1])] if layers is None else list(layers)
        if len(names) != ids.shape[1]:
            raise ValueError(f"layers names {len(names)} layers, ids_TLK has {ids.shape[1]}")
        ids = ids.masked_fill(empty, num_experts)
        weights = weights_TLK.float().masked_fill(empty, 0.0)
        none_T = torch.full((len(ids),), -1)
        rows = PassRows(~empty.all(-1).all(-1), none_T, none_T)
        calls = [TraceCall(layer, 0, phase, ids[:, layer], weights[:, layer], rows) for layer in range(ids.shape[1])]
        return cls(calls, [TraceLayer(i, name, num_experts) for i, name in enumerate(names)])

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[TraceCall]:
        return iter(self._calls)

    @property
    def passes(self) -> int:
        """Forward passes."""
        return len({call.pass_number for call in self})

    def slice(self, start: int = 0, stop: int | None = None, *, phase: str | None = None) -> RoutingTrace:
        """Forward passes ``start`` to ``stop`` (excluded), counted in this trace; those of one phase.

        Args:
            start: first pass, from 0.
            stop: pass to end before; the last by default.
            phase: ``"prefill"``, ``"decode"``, ``"train"`` or None for all.
        """
        order: dict[int, int] = {}
        kept = []
        for call in self:
            place = order.setdefault(call.pass_number, len(order))
            if place >= start and (stop is None or place < stop) and (phase is None or call.phase == phase):
                kept.append(call)
        return RoutingTrace(kept, self.layers)

    def concatenate(self, *others: RoutingTrace) -> RoutingTrace:
        """This trace, then the others; passes are numbered on.

        Raises:
            ValueError: a trace of other layers.
        """
        kept: list[TraceCall] = []
        first = 0
        for trace in (self, *others):
            if trace.layers != self.layers:
                raise ValueError("the traces are of different layers, so they cannot be one trace")
            numbers: dict[int, int] = {}
            for call in trace:
                number = first + numbers.setdefault(call.pass_number, len(numbers))
                kept.append(TraceCall(call.layer, number, call.phase, call.ids_TK, call.weights_TK, call.rows))
            first += len(numbers)
        return RoutingTrace(kept, self.layers)

    def routing(self, call: TraceCall) -> Routing:
        """A call as a :class:`Routing`."""
        experts = next(layer.num_experts for layer in self.layers if layer.index == call.layer)
        mask_T = call.rows.mask_T
        return Routing(call.ids_TK, call.weights_TK, experts, token_mask_T=None if bool(mask_T.all()) else mask_T)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it to a new folder."""
        writer = TraceWriter(folder, self.layers)
        for call in self:
            writer.add(call)
        writer.flush()

    def replay(self) -> Callable[[Call], Routing]:
        """A route for :func:`~moesaic.models.override_routing`: each layer gets its recorded decisions in turn.

        Raises:
            ValueError: in the model's call: a layer that was not traced, other rows than were recorded, more calls than
                were.
        """
        upcoming = {layer.index: iter(self._of_layer(layer.index)) for layer in self.layers}

        def route(call: Call) -> Routing:
            index = call.layer.index
            if index not in upcoming:
                raise ValueError(f"layer {call.layer.name} (index {index}) was not traced")
            found = next(upcoming[index], None)
            if found is None:
                raise ValueError(f"layer {call.layer.name}: the trace holds no further call of it")
            if len(found.ids_TK) != call.routing.num_rows:
                raise ValueError(
                    f"layer {call.layer.name}: the trace has {len(found.ids_TK)} rows in pass {found.pass_number}, the"
                    f" model has {call.routing.num_rows}: replay the inputs that were traced"
                )
            weights_TK = found.weights_TK.to(call.routing.weights_TK)
            return Routing(
                found.ids_TK.to(weights_TK.device),
                weights_TK,
                call.routing.num_experts,
                call.routing.logits_TE,
                call.routing.token_mask_T,
                score_function=call.routing.score_function,
            )

        return route

    def _of_layer(self, index: int) -> Iterable[TraceCall]:
        return (call for call in self if call.layer == index)


class TraceRecorder:
    """Turns recorded calls into a trace on disk.

    Args:
        folder: of the trace.
        layers: handles of the layers.
    """

    def __init__(self, folder: str | os.PathLike[str], layers: Sequence[MoELayer]) -> None:
        self.writer = TraceWriter(folder, [TraceLayer(layer.index, layer.name, _choices(layer)) for layer in layers])
        self._context: Context | None = None
        self._rows: PassRows | None = None
        self._pass = self._last = -1

    def add(self, layer: MoELayer, routing: Routing, context: Context) -> None:
        """Take one run of one layer; layers of one forward pass share their context."""
        if self._rows is None or not self._same_pass(layer, routing, context):
            self._context, self._pass = context, self._pass + 1
            self._rows = _rows(context, routing)
        self._last = layer.index
        phase = context.phase or "unknown"
        self.writer.add(
            TraceCall(layer.index, self._pass, phase, routing.expert_ids_TK, routing.weights_TK, self._rows)
        )

    def _same_pass(self, layer: MoELayer, routing: Routing, context: Context) -> bool:
        if context is self._context:
            return True
        # Where a model hides its tokens each call has a bare context of its own: layers come in order then.
        bare = context.token_mask_T is None and context.group_T is None and context.position_T is None
        assert self._rows is not None
        return bare and layer.index > self._last and routing.num_rows == len(self._rows.mask_T)


def _choices(layer: MoELayer) -> int:
    """What a row can choose from, experts without weights included."""
    return int(getattr(layer.router, "num_experts", layer.num_experts))


def _rows(context: Context, routing: Routing) -> PassRows:
    none_T = torch.full((routing.num_rows,), -1)
    group_T, position_T = (none_T if value is None else value.cpu() for value in (context.group_T, context.position_T))
    return PassRows(routing.real_T.cpu(), group_T, position_T)
