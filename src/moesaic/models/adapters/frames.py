"""What a model's own call says about its tokens: padding, positions, phase. Blocks are never told; here they are."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.routing import Context


@dataclasses.dataclass(eq=False)
class Frame:
    """One running call of a model or of a model inside it.

    Args:
        module: the module that is called.
        batch: B, or 0 when the call shows no tokens.
        length: S of this call (without what a cache holds).
        mask_BS: (B, >= S) padding mask, nonzero for real tokens, or None.
        position_BS: positions, or None.
        phase: train, prefill or decode.
    """

    module: nn.Module
    batch: int
    length: int
    mask_BS: Tensor | None
    position_BS: Tensor | None
    phase: str
    _contexts: dict[torch.device, Context] = dataclasses.field(default_factory=dict)

    def context(self, device: torch.device) -> Context:
        """The context of this call's rows, the same object for every layer on ``device``."""
        if device not in self._contexts:
            mask = None if self.mask_BS is None else self.mask_BS.to(device)
            position = None if self.position_BS is None else self.position_BS.to(device)
            self._contexts[device] = Context.from_mask(
                mask, self.batch, self.length, device=device, position_BS=position, phase=self.phase
            )
        return self._contexts[device]


_frames: ContextVar[tuple[Frame, ...]] = ContextVar("moesaic_frames", default=())


def current_context(rows: int, device: torch.device) -> Context:
    """The context of the innermost running call that has ``rows`` tokens; one without rows when none has."""
    running = _frames.get()
    for frame in reversed(running):
        if frame.batch * frame.length == rows:
            return frame.context(device)
    return Context(phase=running[-1].phase) if running else Context()


@contextmanager
def watch_calls(model: nn.Module, within: Sequence[nn.Module]) -> Iterator[None]:
    """Keep track of calls of ``model`` and of the transformers models inside it that hold the modules ``within``.

    Args:
        model: what the user calls.
        within: the MoE blocks of interest.
    """
    inner = [m for m in model.modules() if m is not model and _is_transformers_model(m) and _holds(m, within)]
    with ExitStack() as stack:
        for module in (model, *inner):
            for handle in (
                module.register_forward_pre_hook(_enter, with_kwargs=True),
                module.register_forward_hook(_leave, always_call=True),
            ):
                stack.callback(handle.remove)
        yield


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    running = _frames.get()
    given = {**dict(zip(_argument_names(type(module).forward), args, strict=False)), **kwargs}
    _frames.set((*running, _read(module, given, running[-1] if running else None)))


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    running = _frames.get()
    if running and running[-1].module is module:
        _frames.set(running[:-1])


def _read(module: nn.Module, given: Mapping[str, Any], outer: Frame | None) -> Frame:
    batch, length = _token_shape(given)
    if outer is not None and ((outer.batch, outer.length) != (batch, length) or _is_encoder_decoder(outer.module)):
        outer = None  # an encoder's padding says nothing about the decoder
    mask = given.get("attention_mask")
    if not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == batch and mask.shape[1] >= length):
        mask = None  # a 4-D mask says who may attend to whom, not which tokens are padding
    elif mask.dtype != torch.bool:
        mask = mask != 0
    position = given.get("position_ids")
    if not (isinstance(position, Tensor) and tuple(position.shape) in ((1, length), (batch, length))):
        position = None
    past = _cached_tokens(given.get("cache", given.get("past_key_values")))
    if outer is not None:
        mask = outer.mask_BS if mask is None else mask
        position = outer.position_BS if position is None else position
    if position is None and mask is None and past and length:
        position = torch.arange(past, past + length)[None]
    phase = "train" if module.training else "decode" if past else "prefill"
    return Frame(module, batch, length, mask, position, phase)


def _token_shape(given: Mapping[str, Any]) -> tuple[int, int]:
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3), ("decoder_input_ids", 2), ("hidden_states", 3)):
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() == dims:
            return int(value.shape[0]), int(value.shape[1])
    return 0, 0


def _cached_tokens(cache: Any) -> int:
    read = getattr(cache, "get_seq_length", None)
    if read is None:
        return 0
    try:
        return int(read())
    except (ValueError, IndexError, AttributeError, TypeError):  # a cache without attention layers, or not yet filled
        return 0


@lru_cache(maxsize=256)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _is_transformers_model(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")  # never imported for this: without it there are none
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _is_encoder_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _holds(module: nn.Module, within: Sequence[nn.Module]) -> bool:
    inside = {id(part) for part in module.modules()}
    return any(id(part) in inside for part in within)
