"""DTop-p (arXiv:2512.13996): a controller holds the mean number of experts while layers share the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.experiments.base import Arm, Experiment, Metric, Outcome, Row, Size
from moesaic.experiments.plots import COLOURS, figure, legend, save
from moesaic.experiments.tasks.characters import Characters
from moesaic.experiments.tasks.toy_lm import ToyLM, evaluate, train
from moesaic.experiments.verdict import Criterion, Means
from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.losses import BalanceLoss, EntropyLoss, RoutingLoss
from moesaic.routing import DynamicTopPRouter, Router, Routing, TopKRouter, TopPRouter, share_controllers

DIM, HEADS, EXPERTS, WIDTH = 64, 8, 16, 32
TARGET = 4
FIXED = {"top-p, p = 0.25": 0.25, "top-p, p = 0.35": 0.35, "top-p, p = 0.45": 0.45}
TOP_K, PI_ONLY, OURS, LAYERWISE = "top-4", "PI controller only", "DTop-p", "DTop-p, layer-wise"
ENDS = 20  # steps at either end of training that "start" and "end" mean


def measure(settings: Mapping[str, Any], seed: int) -> Outcome:
    """Train one model on characters and follow how many experts each layer uses."""
    text = Characters(held_out=0.1)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        moes = [build_moe(settings) for _ in range(settings["layers"])]
        model = ToyLM(len(text.alphabet), DIM, HEADS, settings["length"], moes)
    share_controllers(model)
    active: list[list[float]] = []
    thresholds: list[float] = []

    def watch(step: int, routings: Sequence[Routing]) -> None:
        active.append([float(routing.active_T.double().mean()) for routing in routings])
        router = model.blocks[0].moe.router  # type: ignore[union-attr]
        if isinstance(router, TopPRouter):
            thresholds.append(float(router.threshold()))

    train(
        model,
        lambda step: text.batch(settings["batch"], settings["length"], generator),
        steps=settings["steps"],
        lr=settings["lr"],
        warmup=settings["warmup"],
        cosine=True,
        clip=1.0,
        watch=watch,
    )
    loss, batches = evaluate(model, text.windows(settings["length"], settings["windows"]), settings["eval_batch"])
    a_SL = np.array(active)
    a_S, second = a_SL.mean(1), a_SL[len(a_SL) // 2 :]
    layers = second.mean(0)
    start, end = float(a_S[:ENDS].mean()), float(a_S[-ENDS:].mean())
    rows = sum(routing.num_rows for found in batches for routing in found)
    evaluated = sum(int(routing.active_T.sum()) for found in batches for routing in found) / rows
    metrics = {
        "loss": loss,
        "active": float(second.mean()),
        "active_std": float(second.mean(1).std()),
        "active_error": abs(float(second.mean()) - TARGET),
        "eval_active": evaluated,
        "eval_error": abs(evaluated - TARGET),
        "moved": abs(end - start),
        "end_error": abs(end - TARGET),
        "layer_spread": float(layers.max() - layers.min()),
        "layer_error": float(np.abs(layers - TARGET).max()),
    }
    every = max(len(a_S) // 100, 1)
    curves = {
        "active": np.round(a_S[::every], 4).tolist(),
        "layers": layers.tolist(),
        "p": np.round(thresholds[::every], 5).tolist(),
    }
    return Outcome(metrics, curves)


def build_moe(settings: Mapping[str, Any]) -> MoE:
    """One layer of an arm."""
    losses: list[RoutingLoss] = [BalanceLoss(settings["balance"])]
    if settings["router"] != "top-k":
        losses.append(EntropyLoss(settings["dynamic"]))
    return MoE(FFNExperts(DIM, WIDTH, EXPERTS, activation="swiglu"), build_router(settings), losses=losses)


def build_router(settings: Mapping[str, Any]) -> Router:
    """The router of an arm."""
    if settings["router"] == "top-k":
        return TopKRouter(DIM, EXPERTS, TARGET, renormalize=True)
    if settings["router"] == "top-p":
        return TopPRouter(DIM, EXPERTS, settings["p"])
    return DynamicTopPRouter(
        DIM,
        EXPERTS,
        TARGET,
        normalize=settings["normalize"],
        scope=settings["scope"],
        kp=settings["kp"],
        ki=settings["ki"],
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Active experts and threshold over training, layers' shares, and loss against active experts."""
    drawn, axes = figure(4)
    names = list(dict.fromkeys(row.arm for row in rows))
    for index, name in enumerate(names):
        mine = [row for row in rows if row.arm == name]
        colour = COLOURS[index % len(COLOURS)]
        steps = np.linspace(0, 1, len(mine[0].curves["active"]))
        axes[0].plot(steps, np.mean([row.curves["active"] for row in mine], axis=0), color=colour, label=name)
        if mine[0].curves["p"]:
            axes[1].plot(steps, np.mean([row.curves["p"] for row in mine], axis=0), color=colour)
        layers = np.mean([row.curves["layers"] for row in mine], axis=0)
        axes[2].plot(range(1, len(layers) + 1), layers, "o-", color=colour)
        axes[3].plot(
            [row.metrics["eval_active"] for row in mine], [row.metrics["loss"] for row in mine], "o", color=colour
        )
    axes[2].set_xticks(range(1, 1 + max(len(row.curves["layers"]) for row in rows)))
    for panel in (axes[0], axes[2]):
        panel.axhline(TARGET, color="black", linewidth=0.6, linestyle=":")
    for panel, across, up in zip(
        axes,
        ("share of training", "share of training", "layer", "experts a token, evaluation"),
        ("experts a token", "threshold p", "experts a token, second half", "validation loss (nats/char)"),
        strict=True,
    ):
        panel.set_xlabel(across)
        panel.set_ylabel(up)
    legend(drawn, axes[0])
    save(drawn, path)


def _least_moved(means: Means) -> float:
    return min(means[arm]["moved"] for arm in FIXED)


def _second_most_off_target(means: Means) -> float:
    return sorted((means[arm]["end_error"] for arm in FIXED), reverse=True)[1]


EXPERIMENT = Experiment(
    slug="dtop-p",
    claim=(
        "A fixed top-p threshold lets the number of active experts drift with training. A PI controller on the"
        " threshold holds its mean at the target, and standardised router logits with a learned scale let layers take"
        " different shares of the one budget, at no loss of quality against top-k."
    ),
    settings={
        "layers": 3,
        "length": 48,
        "batch": 16,
        "steps": 500,
        "lr": 2e-3,
        "warmup": 50,
        "balance": 1e-2,
        "dynamic": 1e-3,
        "kp": 0.1,
        "ki": 0.1,
        "windows": None,
        "eval_batch": 64,
    },
    arms=(
        Arm(TOP_K, {"router": "top-k"}),
        *(Arm(name, {"router": "top-p", "p": p}) for name, p in FIXED.items()),
        Arm(PI_ONLY, {"router": "dynamic", "normalize": False, "scope": "model"}),
        Arm(OURS, {"router": "dynamic", "normalize": True, "scope": "model"}),
        Arm(LAYERWISE, {"router": "dynamic", "normalize": True, "scope": "layer"}),
    ),
    seeds=(0, 1, 2),
    metrics=(
        Metric("loss", "validation loss (nats/char)", "lower", 4),
        Metric("active", "experts a token, second half", digits=2),
        Metric("active_std", "its std over steps", "lower"),
        Metric("active_error", "distance from 4", "lower"),
        Metric("eval_active", "experts a token, evaluation", digits=2),
        Metric("eval_error", "distance from 4, evaluation", "lower"),
        Metric("moved", "moved from start to end"),
        Metric("end_error", "distance from 4 at the end", "lower"),
        Metric("layer_spread", "largest - smallest layer", digits=2),
        Metric("layer_error", "layer farthest from 4", digits=2),
    ),
    criteria=(
        Criterion(
            "holds the target",
            "DTop-p: mean experts a token in the second half of training, distance from 4",
            (OURS,),
            lambda means: means[OURS]["active_error"],
            "<=",
            0.05,
        ),
        Criterion(
            "holds it in evaluation",
            "DTop-p: the same in evaluation, with p frozen",
            (OURS,),
            lambda means: means[OURS]["eval_error"],
            "<=",
            0.15,
        ),
        Criterion(
            "fixed thresholds drift",
            "the fixed-p arm that moves least from start to end, in experts",
            tuple(FIXED),
            _least_moved,
            ">",
            0.5,
        ),
        Criterion(
            "fixed thresholds miss",
            "the fixed-p arm second farthest from 4 at the end, in experts",
            tuple(FIXED),
            _second_most_off_target,
            ">",
            0.3,
        ),
        Criterion(
            "layers differ",
            "DTop-p: largest minus smallest layer in the second half, in experts",
            (OURS,),
            lambda means: means[OURS]["layer_spread"],
            ">=",
            0.5,
        ),
        Criterion(
            "layer-wise pins layers",
            "layer-wise DTop-p: layer farthest from 4 in the second half, in experts",
            (LAYERWISE,),
            lambda means: means[LAYERWISE]["layer_error"],
            "<=",
            0.1,
        ),
        Criterion(
            "no worse than top-4",
            "DTop-p's validation loss minus that of top-4 (nats a character)",
            (OURS, TOP_K),
            lambda means: means[OURS]["loss"] - means[TOP_K]["loss"],
            "<=",
            0.01,
        ),
    ),
    measure=measure,
    plot=plot,
    seconds=45.0,
    sizes={"large": Size({"steps": 5000, "warmup": 500}, seconds=450.0)},
    quick={"steps": 40, "warmup": 5, "windows": 64},
)
