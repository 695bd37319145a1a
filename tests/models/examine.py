"""One family through every property, in words: what the table of families is made of and checked by."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models import load
from moesaic.models.fast import use_fast_experts
from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.models.saving import save
from moesaic.models.surgery import drop_experts, reorder_experts
from moesaic.models.surgery_checks import group_limit
from tests.models.families import Family, create, run

COLUMNS = ("layers", "record", "override", "choose", "weights", "reorder", "drop", "save", "ragged", "fast")
TOLERANCE = 1e-4  # of logits of order 1, in float32


@torch.no_grad()
def examine(name: str, family: Family) -> dict[str, str]:
    """``yes`` or the reason of a refusal for each of ``COLUMNS``; a property that does not hold raises.

    Args:
        name: of the family in transformers.
        family: how to build it.
    """
    model = create(name, family)
    found: dict[str, str] = {"layers": _layers(model, family)}
    plain = run(model)
    for column, check in (
        ("record", _record),
        ("override", _override),
        ("choose", _choose),
        ("weights", _weights),
    ):
        found[column] = _said(check, model, family, plain)
    found["fast"] = _fast(model, plain)
    found["reorder"] = _said(_reorder, create(name, family), family, plain)
    model = _with_room(name, family)
    found["drop"], expected = _drop(model, family)
    with tempfile.TemporaryDirectory() as folder:
        found["save"] = found["drop"] if expected is None else _save(model, Path(folder) / "native", expected)
        model = _with_room(name, family)
        found["ragged"] = found["drop"] if expected is None else _ragged(model, family, Path(folder) / "ragged")
    return {column: found[column] for column in COLUMNS}


def _said(check: Callable[[nn.Module, Family, Tensor], None], model: nn.Module, family: Family, plain: Tensor) -> str:
    try:
        check(model, family, plain)
    except ValueError as refusal:
        return _short(refusal)
    return "yes"


def _short(refusal: Exception) -> str:
    """A refusal without the names of layers, so that it is the same for all of a model."""
    text = re.sub(r"^(layer )?[\w.]*\d[\w.]*( \(\w+\))?:? ", "", str(refusal))
    return "no: " + text.split(". ")[0].split(": keep")[0].replace("\n", " ")


def _layers(model: nn.Module, family: Family) -> str:
    layers = moe_layers(model)
    assert len(layers) == family.layers, layers
    assert all(layer.top_k == family.top_k and layer.rule.weigh is not None for layer in layers), layers
    return layers[-1].rule.description


def _record(model: nn.Module, family: Family, plain: Tensor) -> None:
    with record_routing(model, hidden=True, outputs=True) as record:
        assert torch.equal(run(model), plain)
    assert record.calls


def _override(model: nn.Module, family: Family, plain: Tensor) -> None:
    with override_routing(model, lambda call: call.routing, output=lambda call, y: y):
        assert torch.equal(run(model), plain)

    def one(call: Any) -> Any:
        return call.choose(ids_TK=call.routing.expert_ids_TK[:, :1])

    with record_routing(model) as record, override_routing(model, one):
        changed = run(model)
    assert torch.isfinite(changed).all()
    assert all(call.routing.slots == 1 for call in record.calls)


def _choose(model: nn.Module, family: Family, plain: Tensor) -> None:
    def same(call: Any) -> Any:
        chosen = call.choose(ids_TK=call.routing.expert_ids_TK)
        assert torch.allclose(chosen.weights_TK, call.routing.weights_TK, atol=1e-5, rtol=1e-4)
        return chosen

    with override_routing(model, same):
        assert (run(model) - plain).abs().max() < TOLERANCE


def _weights(model: nn.Module, family: Family, plain: Tensor) -> None:
    for layer in moe_layers(model):
        bank = layer.experts
        for expert in range(bank.num_experts):
            bank.write(expert, {key: value[0].clone() for key, value in bank.weights([expert]).items()})
        assert bank.weights([0])["down"].shape == (1, bank.out_dim, bank.width)
    assert torch.equal(run(model), plain)


def _reorder(model: nn.Module, family: Family, plain: Tensor) -> None:
    limit = group_limit(moe_layers(model)[-1])
    size = family.experts // (1 if limit is None else limit.count)
    order = [i for start in range(0, family.experts, size) for i in range(start + size - 1, start - 1, -1)]
    reorder_experts(model, order if family.order is None else family.order)
    assert (run(model) - plain).abs().max() < TOLERANCE


def _with_room(name: str, family: Family) -> nn.Module:
    """A model whose groups can lose an expert each."""
    model = create(name, family)
    if group_limit(moe_layers(model)[-1]) is not None:
        model = create(name, family, n_group=2, topk_group=1)
    for key, value in model.named_buffers():
        if "correction_bias" in key:
            value.abs_()
    return model


def _gone(model: nn.Module, family: Family) -> list[int]:
    limit = group_limit(moe_layers(model)[-1])
    if limit is None:
        return list(family.gone)
    return [group * (family.experts // limit.count) + 1 for group in range(limit.count)]


def _drop(model: nn.Module, family: Family) -> tuple[str, Tensor | None]:
    gone = _gone(model, family)
    allowed = torch.ones(family.choices, dtype=torch.bool)
    allowed[gone] = False
    try:
        drop_experts(copy.deepcopy(model), gone)
        with override_routing(model, lambda call: call.choose(allowed_TE=allowed)):
            expected = run(model)
    except ValueError as refusal:
        return _short(refusal), None
    drop_experts(model, gone)
    dropped = run(model)
    assert (dropped - expected).abs().max() < TOLERANCE, (dropped - expected).abs().max()
    return "yes", dropped


def _save(model: Any, path: Path, expected: Tensor) -> str:
    try:
        saved = save(model, path)
    except ValueError as refusal:
        return _short(refusal)
    assert saved.native
    opened = type(model).from_pretrained(path, dtype=torch.float32).eval()
    assert (run(opened) - expected).abs().max() < TOLERANCE
    return "yes"


def _ragged(model: Any, family: Family, path: Path) -> str:
    try:
        drop_experts(model, {-1: _gone(model, family)})
        assert not save(model, path).native
        opened = load(path)
    except ValueError as refusal:
        return _short(refusal)
    assert (run(opened) - run(model)).abs().max() < TOLERANCE
    return "yes"


def _fast(model: nn.Module, plain: Tensor) -> str:
    try:
        fast = use_fast_experts(model)
    except ValueError as refusal:
        return "no: " + str(refusal).rpartition(": ")[2]
    with fast:
        assert (run(model) - plain).abs().max() < TOLERANCE
    return "yes"
