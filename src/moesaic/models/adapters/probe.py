"""Finding a foreign router's rule: a copy with random weights is run once and the rules that reproduce it are kept.

Random weights put every bias, group and scale in general position, so a rule that is wrong in any of them does not fit;
the model itself is neither run nor touched.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.models.adapters.exchange import Exchange
from moesaic.models.adapters.rules import SCORES, Groups, Place, Rule, Selection
from moesaic.models.adapters.rules_beyond import SequentialRule, SharedSumRule

ROWS = 192
_GROUP_COUNT = ("num_group", "n_group", "num_groups", "n_groups", "num_expert_group")
_GROUPS_KEPT = ("topk_group", "top_k_group", "topk_groups")
_PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What running a copy of a router showed.

    Args:
        rule: the rule that reproduces its weights, or None.
        reason: why there is none.
        outputs: how many values the router returned; 0 when it could not be run alone.
        width: columns of its first output.
        top_k: experts a row takes.
        reach: the ids that it gave lie below this; beyond the bank's experts lie those that return their input.
    """

    rule: Rule | None
    reason: str
    outputs: int
    width: int
    top_k: int
    reach: int = 0


_known: dict[tuple[Any, ...], Probe] = {}


def probe(router: nn.Module, block: nn.Module, exchange: Exchange) -> Probe:
    """The rule of ``router``, found once for all routers of the same class and settings.

    Args:
        router: the router.
        block: the module that calls it; a correction bias may live there.
        exchange: how its choice is read.
    """
    key = _signature(router, block)
    if key is None:
        return _probe(router, block, exchange)
    key = (type(exchange), *key)
    if key not in _known:
        _known[key] = _probe(router, block, exchange)
    return _known[key]


def _signature(router: nn.Module, block: nn.Module) -> tuple[Any, ...] | None:
    """What the rule can depend on; None when it holds learned scalars, whose values are part of the rule."""
    scalars: list[Any] = [type(router), type(block)]
    for holder in (router, getattr(router, "config", None), block):
        scalars.append(
            tuple((k, v) for k, v in vars(holder or object).items() if isinstance(v, int | float | str | bool | None))
            if holder is not None
            else None
        )
    for name, value in (*router.named_parameters(), *router.named_buffers()):
        if value.numel() == 1:
            return None
        scalars.append((name, tuple(value.shape)))
    return tuple(scalars)


def _probe(router: nn.Module, block: nn.Module, exchange: Exchange) -> Probe:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            real_top_k, output, twin, stand_in = _run_copy(router, block, exchange)
    except _PROBE_ERRORS as error:
        return Probe(None, f"its router cannot be run alone ({type(error).__name__}: {error})", 0, 0, 0)
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(item, Tensor) for item in output[:3]):
        count = len(output) if isinstance(output, tuple) else 1
        return Probe(None, f"its router returns {count} values instead of (logits, weights, ids)", count, 0, 0)
    logits = output[0].float().reshape(-1, output[0].shape[-1])
    weights = output[1].float().reshape(logits.shape[0], -1)
    ids = output[2].reshape(logits.shape[0], -1)
    if ids.dtype.is_floating_point or weights.shape != ids.shape:
        return Probe(None, "its router returns no (T, K) ids beside (T, K) weights", 1, logits.shape[-1], 0)
    top_k = real_top_k or ids.shape[1]
    with torch.no_grad():
        rule = _fit(twin, stand_in, logits, weights, ids, top_k)
        if rule is None:
            rule = _fit_sequential(twin, stand_in, logits, weights, ids, top_k)
        if rule is None and len(output) > 3 and isinstance(output[3], Tensor):
            rule = _fit_shared_sum(twin, stand_in, output, top_k)
    reason = "" if rule is not None else "no known rule (score, renormalisation, scale) reproduces its own weights"
    return Probe(
        rule,
        reason,
        len(output),
        logits.shape[1],
        top_k if rule is None else rule.top_k,
        int(ids[ids < logits.shape[1]].max()) + 1,
    )


def _run_copy(router: nn.Module, block: nn.Module, exchange: Exchange) -> tuple[int | None, Any, nn.Module, nn.Module]:
    config = getattr(router, "config", None)
    twin = copy.deepcopy(router, {} if config is None else {id(config): config})
    for module in twin.modules():  # neither anybody's hooks nor an offloader's replaced forward may run in the copy
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module.__dict__.pop("forward", None)
    generator = torch.Generator().manual_seed(0)
    _randomise(twin, generator)
    twin.eval()
    real_top_k = None
    if getattr(twin, "top_k", None) == 1 and not _experts_fewer_than_two(twin):
        real_top_k = 1
        twin.__dict__["top_k"] = 2  # with one expert a renormalised weight is always 1 and hides its score
    arguments, stand_in = _more_arguments(twin, block, generator)
    width = next(p.shape[-1] for p in twin.parameters() if p.dim() >= 2)
    x_TD = torch.randn((ROWS, width), generator=generator)
    try:
        output = exchange.alone(twin, block, x_TD, **arguments)
    except _PROBE_ERRORS:
        output = exchange.alone(twin, block, x_TD[None], **arguments)  # some routers want (B, S, D)
    return real_top_k, output, twin, stand_in


def _experts_fewer_than_two(router: nn.Module) -> bool:
    return int(getattr(router, "num_experts", 2)) < 2


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, value in store.items():
                if value is None or not value.dtype.is_floating_point:
                    if value is not None and value.is_meta:
                        store[name] = torch.zeros(value.shape, dtype=value.dtype, device="cpu")  # type: ignore[assignment]
                    continue
                if value.numel() == 1:
                    fresh = torch.ones(value.shape) if value.is_meta else value.detach().float().cpu()
                else:
                    fresh = torch.randn(value.shape, generator=generator)
                    if value.dim() >= 2 and value.shape[0] > 1:
                        fresh = fresh * 1.5 / value.shape[-1] ** 0.5
                    elif re.search(r"scale|norm|weight", name):
                        fresh = 1.0 + 0.2 * fresh
                is_parameter = isinstance(value, nn.Parameter)
                store[name] = nn.Parameter(fresh, requires_grad=False) if is_parameter else fresh  # type: ignore[assignment]


def _more_arguments(twin: nn.Module, block: nn.Module, generator: torch.Generator) -> tuple[dict[str, Any], nn.Module]:
    """Arguments beside the input: tensors of the block under the argument's name (a correction bias), token ids."""
    stand_in = nn.Module()  # plays the block when the rule reads a bias or a number there
    for name, value in vars(block).items():
        if "normalize" in name and isinstance(value, int | float):
            setattr(stand_in, name, value)
    given: dict[str, Any] = {}
    for name in list(inspect.signature(twin.forward).parameters)[1:]:
        value = getattr(block, name, None)
        if isinstance(value, Tensor):
            given[name] = torch.randn(value.shape, generator=generator)
            stand_in.register_buffer(name, given[name])
        elif name == "input_ids":
            given[name] = torch.zeros((1, ROWS), dtype=torch.int64)
    return given, stand_in


# ---------------------------------------------------------------------------------------------------------- fitting
def _fit(router: nn.Module, block: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor, top_k: int) -> Rule | None:
    probabilities = bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-4).all())
    if probabilities:
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
    real = weights != 0  # a class that skips the experts carries the weight 0
    each = [None, *(place for place, value in _tensors(router, block, logits.shape[1]) if "scale" in place.path)]
    orders = [None, 1.0, *_norm_orders(router, block)]
    for score, order, expert_scale in product(SCORES, orders, each):
        if score == "identity":
            continue
        rule = Rule(
            score, order is not None, 1.0, None, False, expert_scale, None, probabilities, top_k, order=order or 1.0
        )
        plain = rule.weigh(router, block, logits, ids)
        ratio = (weights / plain)[real]
        scale = float(ratio.median())
        if not torch.allclose(ratio, torch.full_like(ratio, scale), rtol=1e-4, atol=0.0):
            continue
        rule = _name_scale(rule, scale, router)
        selection = _fit_selection(router, block, score, logits, ids, real.all(1))
        return dataclasses.replace(rule, selection=selection)
    return None


def _norm_orders(router: nn.Module, block: nn.Module) -> list[float]:
    """Orders of a norm other than the sum that the chosen scores may be divided by."""
    named = [(name, value) for part in (router, block) for name, value in vars(part).items()]
    return [
        float(value)
        for name, value in named
        if "normalize" in name and isinstance(value, int | float) and not isinstance(value, bool) and value != 1
    ]


def _fit_sequential(
    router: nn.Module, block: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor, top_k: int
) -> Rule | None:
    """Picks in sequence inside a margin that the router keeps as a number."""
    for name, value in vars(router).items():
        if not (isinstance(value, float) and re.search(r"jitter|eps|margin", name)):
            continue
        chosen = Selection("identity", None, None, True)
        if not torch.equal(chosen.choose(router, block, logits, ids.shape[1]), ids):
            continue
        # The width of its rows is the number of picks, whatever the router's top_k says.
        rule = SequentialRule("softmax", False, 1.0, None, False, None, chosen, False, ids.shape[1], margin=Place(name))
        if torch.allclose(rule.weigh(router, block, logits, ids), weights, rtol=1e-4, atol=1e-6):
            return rule
    return None


def _fit_shared_sum(router: nn.Module, block: nn.Module, output: tuple[Any, ...], top_k: int) -> Rule | None:
    """Weights that sum to a constant together with those of experts that every row uses, the fourth output."""
    logits = output[0].float().reshape(-1, output[0].shape[-1])
    ids, weights, shared = (output[i].reshape(logits.shape[0], -1) for i in (2, 1, 3))
    totals = weights.float().sum(1) + shared.float().sum(1)
    scale = float(totals.median())
    if not torch.allclose(totals, torch.full_like(totals, scale), rtol=1e-4, atol=0.0):
        return None
    scales = _scale_factors(router, scale)
    for score in SCORES:
        selection = _fit_selection(router, block, score, logits, ids, torch.ones_like(totals, dtype=torch.bool))
        rule = SharedSumRule(
            score, True, scale, None, False, None, selection, False, top_k, shared=int(shared.shape[1]), scales=scales
        )
        if score == "identity" or not torch.allclose(
            rule.weigh(router, block, rule.full_logits(output), ids), weights, rtol=1e-4, atol=1e-6
        ):
            continue
        mine = weights / SCORES[score](logits).gather(1, ids)
        if torch.allclose(mine, mine[:, :1].expand_as(mine), rtol=1e-4, atol=0.0):
            return rule
    return None


def _scale_factors(router: nn.Module, scale: float) -> tuple[Place, ...]:
    """Numbers of the router, learned ones too, whose product is ``scale``; as many as fit."""
    numbers = {name: value for name, value in vars(router).items() if isinstance(value, float)}
    numbers |= {name: float(value) for name, value in router.named_parameters() if value.numel() == 1}
    named = [(name, value) for name, value in numbers.items() if re.search(r"scal|factor", name)]
    for size in range(len(named), 0, -1):
        for some in combinations(named, size):
            if abs(math.prod(value for _, value in some) - scale) <= 1e-4 * abs(scale):
                return tuple(Place(name) for name, _ in some)
    return ()


def _name_scale(rule: Rule, scale: float, router: nn.Module) -> Rule:
    """The rule with its factor traced to where the router keeps it."""
    close = abs(scale) * 1e-4
    if abs(scale - 1.0) <= close:
        scale = 1.0
    for name, value in vars(router).items():
        if isinstance(value, float) and re.search(r"scal|factor", name) and abs(value - scale) <= close:
            return dataclasses.replace(rule, scale=value, scale_place=Place(name))
    top_k = getattr(router, "top_k", None)
    if scale != 1.0 and isinstance(top_k, int) and abs(scale * top_k - 1.0) <= 1e-4:
        return dataclasses.replace(rule, scale=scale, inverse_top_k=True)
    return dataclasses.replace(rule, scale=scale)


def _fit_selection(
    router: nn.Module, block: nn.Module, score: str, logits: Tensor, ids: Tensor, whole_T: Tensor
) -> Selection | None:
    """The first way of choosing that gives the router's ids, in its order if possible.

    Rows that are not whole (``whole_T``: a slot skips the experts) say nothing.
    """
    logits, ids = logits[whole_T], ids[whole_T]
    biases = [None, *(place for place, _ in _tensors(router, block, logits.shape[1]) if "scale" not in place.path)]
    matching: Selection | None = None
    for base, bias, groups, ordered in product((score, "identity"), biases, _group_limits(router), (True, False)):
        candidate = Selection(base, bias, groups, ordered)
        try:
            found = candidate.choose(router, block, logits, ids.shape[1])
        except (RuntimeError, TypeError):  # a limit that does not fit these numbers
            continue
        if torch.equal(found, ids):
            return candidate
        if matching is None and torch.equal(found.sort(1).values, ids.sort(1).values):
            matching = candidate
    return matching


def _group_limits(router: nn.Module) -> Iterator[Groups | None]:
    yield None
    count = next((name for name in _GROUP_COUNT if isinstance(getattr(router, name, None), int)), None)
    kept = next((name for name in _GROUPS_KEPT if isinstance(getattr(router, name, None), int)), None)
    if count is None or kept is None:
        return
    for best, fill in product((2, 1), (-torch.inf, 0.0)):
        yield Groups(count, kept, best, fill)


def _tensors(router: nn.Module, block: nn.Module, width: int) -> list[tuple[Place, Tensor]]:
    """Tensors with one number an expert, in the router or under the block's own names."""
    found: list[tuple[Place, Tensor]] = []
    for holder, on_block in ((router, False), (block, True)):
        for name, value in (
            *holder.named_parameters(recurse=not on_block),
            *holder.named_buffers(recurse=not on_block),
        ):
            if value.numel() == width and value.dtype.is_floating_point and not name.endswith("weight"):
                found.append((Place(name, on_block), value))
    return found
