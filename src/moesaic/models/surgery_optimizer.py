"""Optimizer state that follows a structural change, so that training goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moesaic.models.surgery import IndexMap, Surgery


@torch.no_grad()
def remap_optimizer(optimizer: Any, surgery: Surgery) -> int:
    """Rearrange the state of ``optimizer`` as ``surgery`` rearranged the parameters.

    Moments of an expert go with it, copies start with their source's, dropped ones are forgotten. Step counts stay.
    Works for any optimizer whose state tensors have the parameter's axes (AdamW, Muon, RowAdam with one number a row).
    Call it once after each change, before the next step.

    Args:
        optimizer: a torch optimizer, or the :class:`~moesaic.training.optimizers.Optimizers` of a run.
        surgery: what :func:`~moesaic.models.surgery.drop_experts` and its siblings return.

    Returns:
        How many state tensors were rearranged; 0 for an optimizer that has taken no step.

    Raises:
        ValueError: no parameter of the change belongs to the optimizer; a state tensor that does not fit the
            parameter's old shape, named, for instance after a second call. Nothing is changed then.
    """
    states = list(_states(optimizer))
    parameters = {id(p) for state, groups in states for group in groups for p in group["params"]}
    mine = [found for found in surgery.maps if id(found.tensor) in parameters]
    if surgery.maps and not mine:
        raise ValueError("optimizer holds none of the parameters that the surgery changed: is it of this model?")
    fresh: list[tuple[dict[str, Any], str, Tensor]] = []
    for state, _ in states:
        for found in mine:
            entries = state.get(found.tensor, {}) if hasattr(state, "get") else {}
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    fresh.append((entries, key, _follow(found, key, value)))
    for entries, key, value in fresh:
        entries[key] = value
    return len(fresh)


def _follow(found: IndexMap, key: str, value: Tensor) -> Tensor:
    index = torch.tensor(found.index, dtype=torch.int64, device=value.device)
    for axis in found.axes:
        if value.dim() != found.tensor.dim() or value.shape[axis] != found.size:
            raise ValueError(
                f"state {key!r} of {found.name} has shape {tuple(value.shape)}, which is not that of the parameter"
                f" before the change ({found.size} places along axis {axis}): call once after each change, with an"
                " optimizer whose state is not factored"
            )
        value = value.index_select(axis, index)
    return value


def _states(optimizer: Any) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    inner = getattr(optimizer, "parts", None)
    for one in [optimizer] if inner is None else list(inner.values()):
        if not hasattr(one, "state") or not hasattr(one, "param_groups"):
            raise ValueError(f"optimizer must be a torch optimizer, got {type(one).__name__}")
        yield one.state, one.param_groups
