"""Reading what a model decides: the read-only use of interventions."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from moesaic.layers.intervention import Call
from moesaic.models.adapters.hooks import intervene
from moesaic.models.handle import MoELayer, select_layers
from moesaic.models.trace import TraceRecorder
from moesaic.routing import Context, Routing
from moesaic.routing.state import in_recompute


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedCall:
    """One run of one MoE layer.

    Args:
        layer: its handle.
        routing: the routing that was used.
        x: (T, D) input of the layer, or None when it was not asked for.
        y: (T, O) output of the layer, shared experts included, or None when it was not asked for.
        context: what was known beside the input: padding, positions, phase.
    """

    layer: MoELayer
    routing: Routing
    x: Tensor | None
    y: Tensor | None
    context: Context


class Record:
    """What :func:`record_routing` recorded, in the order in which layers ran; a layer that runs twice has two calls."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self.layers = list(layers)
        self._entries: list[tuple[int, Any]] = []
        self._closed = False
        self._streamed: tuple[int, str] | None = None

    @property
    def calls(self) -> list[Any]:
        """The recorded calls, or what ``reduce`` made of them.

        Raises:
            RuntimeError: the block is over and no layer reported anything.
        """
        self._check()
        if self._streamed is not None:
            raise RuntimeError(
                f"the calls were streamed to {self._streamed[1]}: open them with moesaic.RoutingTrace.load"
            )
        return [entry for _, entry in self._entries]

    def by_layer(self, index: int) -> list[Any]:
        """Calls of the layer with this index; none where a layer did not run (a vision bank without images).

        Raises:
            RuntimeError: see ``calls``.
            ValueError: an index that was not recorded.
        """
        self._check()
        known = [layer.index for layer in self.layers]
        if index not in known:
            raise ValueError(f"index {index} was not recorded; recorded are the layers {known}")
        return [entry for place, entry in self._entries if place == index]

    def __len__(self) -> int:
        return len(self._entries) if self._streamed is None else self._streamed[0]

    def _check(self) -> None:
        if self._closed and not len(self):
            raise RuntimeError(_NOTHING)

    def _close(self) -> None:
        self._closed = True


_NOTHING = (
    "record_routing recorded nothing: either the model was not run inside the block, or its layers did not report"
    " (hooks do not fire in compiled or replayed graphs, nor where a fused kernel computes the routing itself)"
)


@contextmanager
def record_routing(
    model: nn.Module,
    hidden: bool = False,
    outputs: bool = False,
    reduce: Callable[[RecordedCall], Any] | None = None,
    layers: Sequence[int | str | MoELayer] | None = None,
    stream_to: str | os.PathLike[str] | None = None,
) -> Iterator[Record]:
    """Record, inside the block, every decision of the model's MoE layers; what the model computes stays bit-identical.

    Recorded tensors keep their gradient, so losses on routings, inputs and outputs can be built from them. Under
    gradient checkpointing only the first pass is recorded; with ``use_reentrant=False``, transformers' default, it
    carries gradient.
    Inside an override (``with record: with override:``) the overridden routing is recorded.

    Args:
        model: see :func:`~moesaic.models.override.override_routing`.
        hidden: keep each layer's input.
        outputs: keep each layer's output.
        reduce: called with each :class:`RecordedCall` (input and output always there); only what it returns is kept,
            so memory stays flat over any number of tokens.
        layers: indices, names or handles of MoE layers; all by default.
        stream_to: folder of a new trace to which the routings are written as they come, with flat memory and readable
            after a kill; open it with :class:`~moesaic.models.trace.RoutingTrace`. The record keeps no call then.

    Yields:
        The record. It warns at the end of the block, and raises when read after it, if no layer reported anything.

    Raises:
        ValueError: no MoE layer, or an unknown one in ``layers``; ``stream_to`` beside what it does not write
            (``hidden``, ``outputs``, ``reduce``), or a folder that holds a trace.
    """
    if stream_to is not None and (hidden or outputs or reduce is not None):
        raise ValueError("stream_to writes routings only: leave hidden, outputs and reduce out, or give no stream_to")
    chosen = select_layers(model, layers)
    record = Record(chosen)
    trace = None if stream_to is None else TraceRecorder(stream_to, chosen)
    recorder = _Recorder(record, hidden, outputs, reduce, trace)
    try:
        with intervene(model, [layer.shell for layer in chosen if layer.shell is not None], recorder):
            yield record
    finally:
        if trace is not None:
            trace.writer.flush()
        record._close()
    if not len(record):
        warnings.warn(_NOTHING, RuntimeWarning, stacklevel=3)


class _Recorder:
    def __init__(
        self,
        record: Record,
        hidden: bool,
        outputs: bool,
        reduce: Callable[[RecordedCall], Any] | None,
        trace: TraceRecorder | None,
    ) -> None:
        self._record = record
        self._trace = trace
        self._hidden = hidden or reduce is not None
        self._outputs = outputs or reduce is not None
        self._reduce = reduce
        self._handles = {id(layer.module): layer for layer in record.layers}

    def handle_of(self, module: nn.Module) -> MoELayer | None:
        return self._handles.get(id(module))

    def route(self, call: Call) -> Routing:
        return call.routing

    def output(self, call: Call, y_TO: Tensor) -> Tensor:
        if in_recompute():
            return y_TO
        if self._trace is not None:
            self._trace.add(call.layer, call.routing, call.context)
            self._record._streamed = (self._trace.writer.calls, str(self._trace.writer.folder))
            return y_TO
        recorded = RecordedCall(
            call.layer,
            call.routing,
            call.x_TD if self._hidden else None,
            y_TO if self._outputs else None,
            call.context,
        )
        entry = recorded if self._reduce is None else self._reduce(recorded)
        self._record._entries.append((call.layer.index, entry))
        return y_TO
