"""The one way to intervene in a model's routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from moesaic.layers.intervention import Call
from moesaic.models.adapters.hooks import intervene
from moesaic.models.handle import MoELayer, select_layers
from moesaic.routing import Routing


@contextmanager
def override_routing(
    model: nn.Module,
    route: Callable[[Call], Routing] | None,
    output: Callable[[Call, Tensor], Tensor] | None = None,
    layers: Sequence[int | str | MoELayer] | None = None,
) -> Iterator[list[MoELayer]]:
    """Decide, inside the block, where rows go and what a layer returns.

    ``route(call)`` returns the Routing to use: ``call.routing`` itself (bit-equal to no override), one from
    ``call.choose`` (another choice, weighed by the model's own rule), or any other. Empty slots are safe whatever the
    model's kernels do with them. In ``call.routing`` padded rows are empty slots; left so, the model computes for them
    what it would have. Weights include every scale factor of the layer, also one that a foreign block applies after
    its experts.

    Overrides nest, inner first: each sees as ``call.routing`` what the one inside it decided. Under gradient
    checkpointing ``route`` is called again in recomputation and must decide the same, so run ``backward()`` inside the
    block.

    Args:
        model: a model of ours or of transformers; call this object (or one that contains it) so that padding is known.
        route: what decides, or None to leave the routing alone.
        output: ``output(call, y_TO)`` returns the layer's output (T, O) to use, shared experts included; it may be
            ``y_TO`` itself. Where router and experts hang on a decoder layer beside a dense MLP it is the output of
            the experts alone.
        layers: indices, names or handles of MoE layers; all by default.

    Yields:
        The handles concerned.

    Raises:
        ValueError: no MoE layer, an unknown one in ``layers``; in the model's call, a Routing of other rows or experts.
    """
    chosen = select_layers(model, layers)
    with intervene(
        model, [layer.shell for layer in chosen if layer.shell is not None], _Override(chosen, route, output)
    ):
        yield chosen


class _Override:
    def __init__(
        self,
        layers: Sequence[MoELayer],
        route: Callable[[Call], Routing] | None,
        output: Callable[[Call, Tensor], Tensor] | None,
    ) -> None:
        self._handles = {id(layer.module): layer for layer in layers}
        self._route = route
        self._output = output

    def handle_of(self, module: nn.Module) -> MoELayer | None:
        return self._handles.get(id(module))

    def route(self, call: Call) -> Routing:
        return call.routing if self._route is None else self._route(call)

    def output(self, call: Call, y_TO: Tensor) -> Tensor:
        return y_TO if self._output is None else self._output(call, y_TO)
