"""Hooks that let open interventions into foreign layers; installed only while one is open, removed whatever happens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from moesaic.layers.intervention import Call, Intervention, concerning, decide, opened
from moesaic.models.adapters.exchange import Produced
from moesaic.models.adapters.frames import current_context, watch_calls
from moesaic.models.adapters.shell import Shell
from moesaic.routing import Context, Routing
from moesaic.routing.state import in_recompute

_REMEMBERED = 64  # first passes per layer that may wait for their backward
_SAMPLES = 64


@contextmanager
def intervene(model: nn.Module, shells: Sequence[Shell], intervention: Intervention) -> Iterator[None]:
    """Open ``intervention`` for the block, with hooks on ``shells`` (layers of ours report by themselves).

    Args:
        model: what the user calls; its arguments say which tokens are padding.
        shells: foreign layers that it concerns.
        intervention: what to ask.
    """
    with ExitStack() as stack:
        stack.enter_context(watch_calls(model, [shell.block for shell in shells]))
        for shell in shells:
            stack.enter_context(_hooked(shell))
        stack.enter_context(opened(intervention))
        yield


_lock = threading.Lock()
_sites: dict[int, _Site] = {}


@contextmanager
def _hooked(shell: Shell) -> Iterator[None]:
    """Hooks on a layer, one pair however many interventions are open: they ask them all, inner first."""
    key = id(shell.block)
    with _lock:
        site = _sites.get(key)
        if site is None:
            site = _sites[key] = _Site(shell)
        site.users += 1
    try:
        yield
    finally:
        with _lock:
            site.users -= 1
            if not site.users:
                del _sites[key]
                site.remove()


class _Site:
    """The hooks of one layer and what passes between them."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.users = 0
        self._calls: dict[int, list[tuple[Intervention, Call]]] = {}
        self._contexts: deque[tuple[Tensor, Context]] = deque(maxlen=_REMEMBERED)
        self._handles = [
            *shell.exchange.attach(shell.router, shell.experts.module, shell.block, self._decide),
            shell.output_site.register_forward_hook(self._after_output),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _decide(self, x: Tensor, produce: Callable[[], Produced]) -> tuple[Produced, Routing] | None:
        thread = threading.get_ident()
        self._calls.pop(thread, None)  # left over when the block failed after its router
        found = concerning(self.shell.block)
        if not found:
            return None
        x_TD = x.reshape(-1, x.shape[-1])
        context = self._context(x_TD)
        output = produce()
        before = self.shell.decode(output, context)
        chooser = self.shell.chooser(output, context)
        routing, calls = decide(found, x_TD, context, before, self.shell.router, chooser)
        self._calls[thread] = calls
        return None if routing is before else (self.shell.encode(routing, output), routing)

    def _after_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        calls = self._calls.pop(threading.get_ident(), None)
        if not calls:
            return None
        y: Tensor = output[0] if isinstance(output, tuple) else output
        y_TO = before = y.reshape(-1, y.shape[-1])
        for intervention, call in calls:
            y_TO = intervention.output(call, y_TO)
        if y_TO is before:
            return None
        if not isinstance(y_TO, Tensor) or y_TO.shape != before.shape:
            got = tuple(y_TO.shape) if isinstance(y_TO, Tensor) else type(y_TO).__name__
            raise ValueError(
                f"layer {self.shell.name}: an output override must return {tuple(before.shape)}, got {got}"
            )
        y = y_TO.to(y.dtype).reshape(y.shape)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    def _context(self, x_TD: Tensor) -> Context:
        """The context of this call.

        Recomputation runs the layer alone, without the model's call around it: what the first pass knew is found again
        by the input, which is recomputed as it was.
        """
        sample = x_TD.detach().reshape(-1)[:: max(1, x_TD.numel() // _SAMPLES)]
        if in_recompute():
            near = [
                (a, c) for a, c in self._contexts if a.shape == sample.shape and c.num_rows in (None, x_TD.shape[0])
            ]
            if near:
                return min(near, key=lambda item: float((item[0] - sample).abs().max()))[1]
        context = current_context(x_TD.shape[0], x_TD.device)
        if self.shell.block.training and not in_recompute():
            self._contexts.append((sample.clone(), context))
        return context
