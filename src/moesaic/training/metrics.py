"""Numbers of a run: a line of metrics, and the report at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.routing import Routing
from moesaic.training.report import TrainReport
from moesaic.training.run_state import RunState
from moesaic.training.statistics import routing_summary
from moesaic.training.task import Task, auxiliary_terms


def step_metrics(
    state: RunState,
    routings: Sequence[Routing],
    norm: float | None,
    progress: float,
    since: tuple[int, float],
    unit: str,
    more: Mapping[str, float],
) -> dict[str, Any]:
    """One line of metrics.

    Args:
        state: of the run; its position holds the mean loss since the last line.
        routings: of the step's last micro-batch; loads and auxiliary losses are theirs.
        norm: of the gradient before clipping.
        progress: share of the run that is over.
        since: items and seconds at the last line, for the speed.
        unit: what the task counts; names the counter and the speed.
        more: the task's own numbers of this step.
    """
    position = state.position
    items, seconds = position.items - since[0], position.elapsed - since[1]
    metrics: dict[str, Any] = {
        "step": position.step,
        "loss": position.last_loss,
        "lr": max(group["lr"] for part in state.optimizers.parts.values() for group in part.param_groups),
        unit: position.items,
        **more,
        **{f"loss_{name}": float(value) for name, value in auxiliary_terms(routings).items()},
        **routing_summary(routings),
    }
    if norm is not None:
        metrics["gradient_norm"] = norm
    return metrics | {
        "progress": min(progress, 1.0),
        "seconds": round(position.elapsed, 3),
        "seconds_left": round(position.elapsed * (1 / progress - 1), 1) if progress < 1 else 0.0,
        f"{unit}_per_second": round(items / max(seconds, 1e-9), 1),
    }


def make_report(
    state: RunState,
    task: Task[Any],
    *,
    checkpoint: Path | None,
    model: Path | None,
    metrics: Path | None,
    notes: Sequence[str],
) -> TrainReport:
    """The report of a run that has come to its end."""
    position = state.position
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    return TrainReport(
        steps=position.step,
        items=position.items,
        unit=task.unit,
        loss_unit=task.loss_unit,
        seconds=position.elapsed,
        loss=position.last_loss,
        eval_loss=position.eval_loss,
        best_eval=position.best_eval,
        moe_layers=len(state.loads.layers),
        experts=state.movement.num_experts,
        unmoved=state.movement.unmoved(position.step, state.loads.totals()),
        parameters=trained,
        frozen_parameters=sum(p.numel() for p in state.model.parameters()) - trained,
        checkpoint=checkpoint,
        model=model,
        metrics=metrics,
        failed_saves=list(position.failed_saves),
        notes=list(notes),
    )
