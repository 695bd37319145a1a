"""Modules that a model uses in several places, written so that the file opens again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel


def written_state(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The tensors to write where a module or tensor is used in several places; None where nothing is shared so.

    No configuration of transformers says that two layers are one module, so a file must hold each place's tensors: what
    is shared is written once for each place and opens as equal copies. Tensors that the family itself ties (embedding
    and head) are left to it.

    Args:
        model: what is to be saved.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    known = {*tied.keys(), *tied.values()}
    state: dict[str, Tensor] = model.state_dict()
    names: dict[object, list[str]] = defaultdict(list)
    for name, value in state.items():
        if name not in known and not value.is_meta and value.numel():
            names[(value.data_ptr(), value.dtype, value.shape, value.stride())].append(name)
    again = [name for same in names.values() for name in same[1:]]
    for name in again:
        state[name] = state[name].clone()
    return state if again else None
