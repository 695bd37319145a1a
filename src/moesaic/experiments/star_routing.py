"""STAR (arXiv:2606.08814): a gate in the principal subspace keeps routing informative as the expert count grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.analysis.assignment import routing_metrics
from moesaic.experiments.base import Arm, Experiment, Metric, Outcome, Row, Size, summarise
from moesaic.experiments.plots import COLOURS, figure, legend, save
from moesaic.experiments.tasks.hmm import HMMMixture
from moesaic.experiments.tasks.toy_lm import ToyLM, evaluate, train
from moesaic.experiments.verdict import Criterion, Means
from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.routing import (
    CosineRouter,
    ExpertChoiceRouter,
    GHASubspace,
    PrincipalSubspaceRouter,
    ReLURouter,
    Router,
    Routing,
    TopKRouter,
    test_time_adaptation,
)

DIM, HEADS, WIDTH = 64, 4, 32
COUNTS = (20, 40)
# Standard deviation of the linear gate's start in the paper's runs. Without it our routers start at 1 / sqrt(D), with
# logits of unit size: the arms called "unit logits".
GATE_STD = 0.01
SHIFTS = {"mixture": "3 of the 10 sources", "turn": "turning input axes"}
ROUTERS: dict[str, dict[str, Any]] = {
    "linear": {"router": "linear", "gate_std": GATE_STD},
    "STAR": {"router": "star", "gate_std": GATE_STD},
    "STAR, frozen basis": {"router": "star", "gate_std": GATE_STD, "update": "never"},
    "STAR, R = I": {"router": "star", "gate_std": GATE_STD, "mix": "identity"},
    "linear, unit logits": {"router": "linear"},
    "STAR, unit logits": {"router": "star"},
    "ReMoE": {"router": "remoe"},
    "expert choice": {"router": "expert choice"},
    "cosine": {"router": "cosine"},
}


def measure(settings: Mapping[str, Any], seed: int) -> Outcome:
    """Train one model on the mixture and look at its loss and at what its routing knows."""
    length = settings["length"]
    source = HMMMixture(seed=settings["models_seed"])
    stream = np.random.default_rng([1, seed])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = build_router(settings)
        experts = FFNExperts(DIM, WIDTH, settings["experts"], activation="gelu", bias=True)
        model = ToyLM(source.symbols, DIM, HEADS, length, [MoE(experts, router)])
    train(
        model,
        lambda step: source.sample(settings["batch"], length + 1, stream)[0],
        steps=settings["steps"],
        lr=settings["lr"],
    )
    held_out, label_W = source.sample(settings["held_out"], length + 1, np.random.default_rng([2, 0]))
    loss, batches = evaluate(model, held_out, settings["eval_batch"])
    # Inside one batch of evaluation, so that expert choice competes as it was trained to; the counts are then pooled.
    routing = _pooled([found[0] for found in batches])
    found = routing_metrics(routing, label_W.repeat_interleave(length))
    metrics = {
        "loss": loss,
        "information": found["mutual_information"],
        "load_entropy": found["load_entropy"],
        "load_cv": found["load_cv"],
        "active": float(routing.active_T.double().mean()),
    }
    curves = {"load": (routing.load_E / routing.load_E.sum()).tolist()}
    if isinstance(router, PrincipalSubspaceRouter):
        metrics.update(shift_test(model, router, source, settings))
        curves["linear_share"] = router.alpha_E.detach().sigmoid().tolist()
    return Outcome(metrics, curves)


def build_router(settings: Mapping[str, Any]) -> Router:
    """The router of an arm; one expert a token each, on average where the number varies."""
    router = _router(settings)
    if "gate_std" in settings:
        torch.nn.init.normal_(router.get_parameter("weight_ED"), std=settings["gate_std"])
    return router


def _router(settings: Mapping[str, Any]) -> Router:
    kind, experts = settings["router"], settings["experts"]
    if kind == "star":
        return PrincipalSubspaceRouter(
            DIM,
            experts,
            1,
            basis_lr=settings["basis_lr"],
            update=settings.get("update", "forward"),
            mix=settings.get("mix", "learned"),
        )
    if kind == "remoe":
        return ReLURouter(DIM, experts, 1)
    if kind == "expert choice":
        return ExpertChoiceRouter(DIM, experts, 1, grouping="position")
    if kind == "cosine":
        return CosineRouter(DIM, experts, 1)
    return TopKRouter(DIM, experts, 1)


def shift_test(
    model: ToyLM, router: PrincipalSubspaceRouter, source: HMMMixture, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Let the world shift while the model is used, with and without adaptation of the basis.

    Two shifts, each a stream of batches: the mixture shrinks to a few of its models; or the axes of the router's inputs
    turn slowly, up to ``turn`` radians in the fastest plane at the end.

    Returns:
        For each shift what adaptation adds to the mean loss over the stream (each batch moves the basis, then is
        routed), and to the share of energy of the inputs at its end that the basis captures.
    """
    random, length = np.random.default_rng([3, 0]), settings["length"]
    few, _ = source.sample(settings["held_out"], length + 1, random, settings["shift_models"])
    all_of_them, _ = source.sample(settings["held_out"], length + 1, random)
    spin = torch.from_numpy(random.standard_normal((DIM, DIM))).float()
    spin = spin - spin.T
    spin = spin * settings["turn"] / torch.linalg.matrix_norm(spin, 2)
    found = {}
    for name, stream, turning in (("mixture", few, 0.0), ("turn", all_of_them, 1.0)):
        still = _follow(model, router, stream, spin * turning, settings["batch"])
        trained = router.subspace.basis_KD.clone()
        with test_time_adaptation(model, keep=True):
            moving = _follow(model, router, stream, spin * turning, settings["batch"])
        found[f"{name}_loss"] = moving[0] - still[0]
        found[f"{name}_energy"] = router.subspace.captured_energy(moving[1]) - _energy(trained, still[1])
        router.subspace.basis_KD.copy_(trained)
    return found


def _follow(
    model: ToyLM, router: PrincipalSubspaceRouter, stream: Tensor, spin_DD: Tensor, batch: int
) -> tuple[float, Tensor]:
    """Mean loss over a stream, and the router's inputs in its last quarter turned like those of the last batch."""
    parts = torch.split(stream, batch)
    turns = [torch.linalg.matrix_exp(spin_DD * (step + 1) / len(parts)) for step in range(len(parts))]
    inputs: list[Tensor] = []

    def turn(module: torch.nn.Module, arguments: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        inputs.append(arguments[0].detach())
        return arguments[0] @ turns[len(inputs) - 1].T, arguments[1]

    with router.register_forward_pre_hook(turn):
        loss, _ = evaluate(model, stream, batch)
    return loss, torch.cat(inputs[-max(len(inputs) // 4, 1) :]) @ turns[-1].T


def _energy(basis_KD: Tensor, x_TD: Tensor) -> float:
    subspace = GHASubspace(basis_KD.shape[1], basis_KD.shape[0])
    subspace.basis_KD.copy_(basis_KD)
    return subspace.captured_energy(x_TD)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Loss and mutual information against the number of experts, and the load of each router's experts."""
    summary = summarise(rows)
    drawn, axes = figure(3)
    for panel, (name, label) in zip(
        axes, (("loss", "held-out loss (nats)"), ("information", "I(expert; source) (nats)")), strict=False
    ):
        for index, router in enumerate(ROUTERS):
            entries = [(k, summary[arm_name(router, k)][name]) for k in COUNTS if arm_name(router, k) in summary]
            panel.errorbar(
                [k + 0.4 * (index - 4) for k, _ in entries],
                [entry["mean"] for _, entry in entries],
                yerr=[entry["std"] for _, entry in entries],
                marker="o",
                color=COLOURS[index],
                label=router,
                capsize=2,
            )
        panel.set_xticks(COUNTS)
        panel.set_xlabel("experts K")
        panel.set_ylabel(label)
    for index, router in enumerate(ROUTERS):
        loads = [sorted(row.curves["load"], reverse=True) for row in rows if row.arm == arm_name(router, COUNTS[-1])]
        if loads:
            axes[2].plot(np.mean(loads, axis=0), color=COLOURS[index])
    axes[2].set_xlabel(f"expert, by load (K = {COUNTS[-1]})")
    axes[2].set_ylabel("share of assignments")
    legend(drawn, axes[0])
    save(drawn, path)


def arm_name(router: str, experts: int) -> str:
    """Name of an arm."""
    return f"{router}, K = {experts}"


def _pooled(routings: Sequence[Routing]) -> Routing:
    slots = max(routing.slots for routing in routings)
    experts = routings[0].num_experts
    ids = [F.pad(r.expert_ids_TK, (0, slots - r.slots), value=experts) for r in routings]
    weights = [F.pad(r.weights_TK, (0, slots - r.slots)) for r in routings]
    return Routing(torch.cat(ids), torch.cat(weights), experts)


def _criteria(experts: int) -> list[Criterion]:
    name = {router: arm_name(router, experts) for router in ROUTERS}
    star, linear, identity = name["STAR"], name["linear"], name["STAR, R = I"]
    four = tuple(name[router] for router in ("linear", "STAR", "STAR, frozen basis", "STAR, R = I"))

    def most_informative(means: Means) -> float:
        return means[star]["information"] - max(means[arm]["information"] for arm in four if arm != star)

    def lowest_entropy(means: Means) -> float:
        return means[identity]["load_entropy"] - min(means[arm]["load_entropy"] for arm in four if arm != identity)

    at = f"K = {experts}"
    return [
        Criterion(
            f"loss below linear, {at}",
            f"STAR's loss minus the linear router's, {at}",
            (star, linear),
            lambda means: means[star]["loss"] - means[linear]["loss"],
            "<",
            0.0,
        ),
        Criterion(
            f"loss below R = I, {at}",
            f"STAR's loss minus that with R = I, {at}",
            (star, identity),
            lambda means: means[star]["loss"] - means[identity]["loss"],
            "<",
            0.0,
        ),
        Criterion(
            f"most information, {at}",
            f"STAR's mutual information minus the highest of linear, frozen basis and R = I, {at}",
            four,
            most_informative,
            ">",
            0.0,
        ),
        Criterion(
            f"R = I collapses, {at}",
            f"load entropy with R = I minus the lowest of linear, STAR and frozen basis, {at}",
            four,
            lowest_entropy,
            "<",
            0.0,
        ),
        *(criterion for key, what in SHIFTS.items() for criterion in _shift_criteria(star, key, f"{what}, {at}")),
    ]


def _shift_criteria(star: str, key: str, where: str) -> list[Criterion]:
    return [
        Criterion(
            f"adaptation follows, {where}",
            f"captured energy gained by test-time adaptation, {where}",
            (star,),
            lambda means: means[star][f"{key}_energy"],
            ">",
            0.0,
        ),
        Criterion(
            f"adaptation does no harm, {where}",
            f"loss added by test-time adaptation, {where}",
            (star,),
            lambda means: means[star][f"{key}_loss"],
            "<=",
            0.01,
        ),
    ]


EXPERIMENT = Experiment(
    slug="star-routing",
    claim=(
        "Interpolating the linear gate with one in the online principal subspace of the router's inputs lowers the loss"
        " and keeps the mutual information between expert and data source as the number of experts grows; without the"
        " mixing matrix (R = I) experts inherit the variance ranking and the low ones die; the subspace can follow a"
        " shift at test time."
    ),
    settings={
        "models_seed": 0,
        "length": 32,
        "batch": 32,
        "steps": 300,
        "lr": 3e-3,
        "basis_lr": 0.01,
        "held_out": 1280,
        "eval_batch": 160,
        "shift_models": 3,
        "turn": 1.0,
    },
    arms=tuple(
        Arm(arm_name(router, count), {**settings, "experts": count})
        for count in COUNTS
        for router, settings in ROUTERS.items()
    ),
    seeds=(0, 1, 2, 3, 4),
    metrics=(
        Metric("loss", "loss (nats)", "lower", 4),
        Metric("information", "I(expert; source) (nats)", "higher"),
        Metric("load_entropy", "load entropy / log K"),
        Metric("load_cv", "load CV"),
        Metric("active", "experts a token", digits=2),
        Metric("mixture_energy", "energy gained by TTA, 3 of 10 sources", "higher", 4, optional=True),
        Metric("mixture_loss", "loss added by TTA, 3 of 10 sources", "lower", 4, optional=True),
        Metric("turn_energy", "energy gained by TTA, turning axes", "higher", 4, optional=True),
        Metric("turn_loss", "loss added by TTA, turning axes", "lower", 4, optional=True),
    ),
    criteria=tuple(criterion for count in COUNTS for criterion in _criteria(count)),
    measure=measure,
    plot=plot,
    seconds=10.0,
    sizes={"large": Size({"steps": 3000, "held_out": 5120}, seconds=100.0)},
    quick={"steps": 40, "held_out": 320},
    quick_arms=tuple(arm_name(router, COUNTS[0]) for router in ROUTERS),
)
