"""What a run did: numbers, coverage, experts that never moved, where results lie."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.training.statistics import UnmovedExpert


@dataclass(frozen=True)
class TrainReport:
    """Result of :meth:`Trainer.train`.

    Attributes:
        steps: optimizer steps taken in all.
        items: tokens, rows ... trained on in all.
        unit: what the items are, in the plural; ``as_dict`` names the count by it.
        loss_unit: what losses are measured in.
        seconds: of training, those before a resume included.
        loss: mean loss since the last logged line.
        eval_loss: last held-out loss, None without a held-out part.
        best_eval: lowest held-out loss.
        moe_layers: layers whose routings were seen.
        experts: experts watched for movement.
        unmoved: experts whose weights never moved.
        parameters: trainable numbers.
        frozen_parameters: numbers that were not trained.
        checkpoint: last checkpoint.
        model: folder of the finished model.
        metrics: file of metrics.
        failed_saves: checkpoints that could not be written, with the reason.
        notes: what was done otherwise than asked, such as eager execution without a compiler.
    """

    steps: int
    items: int
    unit: str
    loss_unit: str
    seconds: float
    loss: float | None
    eval_loss: float | None
    best_eval: float | None
    moe_layers: int
    experts: int
    unmoved: list[UnmovedExpert]
    parameters: int
    frozen_parameters: int
    checkpoint: Path | None
    model: Path | None
    metrics: Path | None
    failed_saves: list[str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        values[self.unit] = values.pop("items")
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        lines = [f"{self.steps} steps, {self.items} {self.unit} in {self.seconds:.1f} s"]
        if self.loss is not None:
            lines.append(f"training loss {self.loss:.4f} {self.loss_unit}")
        if self.eval_loss is not None:
            lines.append(f"held-out loss {self.eval_loss:.4f} {self.loss_unit} (best {self.best_eval:.4f})")
        lines.append(
            f"covered: {self.parameters} trained and {self.frozen_parameters} frozen parameters,"
            f" {self.moe_layers} MoE layers, {self.experts} experts"
        )
        lines += _unmoved_lines(self.unmoved, self.experts)
        lines += [f"checkpoint not written: {reason}" for reason in self.failed_saves]
        lines += self.notes
        for name, path in (("model", self.model), ("checkpoint", self.checkpoint), ("metrics", self.metrics)):
            if path is not None:
                lines.append(f"{name}: {path}")
        return lines


def _unmoved_lines(unmoved: list[UnmovedExpert], experts: int) -> list[str]:
    if not experts:
        return []
    if not unmoved:
        return ["every expert's weights moved"]
    lines = []
    kinds = (
        ("frozen (requires_grad is off)", [e for e in unmoved if not e.trainable]),
        ("NEVER MOVED though they received tokens", [e for e in unmoved if e.trainable and e.tokens]),
        ("never moved: no tokens at logged steps", [e for e in unmoved if e.trainable and e.tokens == 0]),
        ("never moved", [e for e in unmoved if e.trainable and e.tokens is None]),
    )
    for title, found in kinds:
        banks: dict[str, list[int]] = {}
        for item in found:
            banks.setdefault(item.bank, []).append(item.expert)
        lines += [f"experts {title}: {bank} {ids}" for bank, ids in banks.items()]
    return lines
