"""The controller that holds the mean number of experts per row by moving a threshold."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.routing.routing import Routing
from moesaic.routing.state import StepCounter, StepState, reduce_sum


class PIThresholdController(StepState):
    r"""Proportional-integral controller of a top-p threshold (DTop-p, arXiv:2512.13996).

    With :math:`a_t` the mean number of experts over all rows, layers, micro-batches and ranks of optimizer step t,

    .. math:: e_t = (T - a_t) / E, \qquad
              p_{t+1} = \mathrm{clamp}\Big(p_0 + K_p e_t + K_i \sum_{s \le t} e_s,\; p_{\min},\; p_{\max}\Big).

    Errors are summed no further than to where p reaches its clamp. :math:`p_0` is set by the first batch as the mean
    mass of the T best experts (:meth:`calibrate`) unless it is given; before that, p is what standardised normal logits
    would need.

    The loop is stable where :math:`s K_p < 1` and :math:`s (2 K_p + K_i) < 2`, with s the slope of :math:`a / E` in p:
    1 for a uniform router, more for a sharp one. With 0.1 and 0.1 it holds up to s = 6.7 and settles in about 10 / s
    steps.

    The state is float64, stored as its bytes: numbers below 256 that every dtype holds, so that no cast of a model's
    buffers, on purpose or at load, can round it.

    Args:
        target: T, in [1, E].
        num_experts: E.
        kp: :math:`K_p`.
        ki: :math:`K_i`.
        p0: start of p; None to calibrate it on the first batch.
        p_min: lower clamp.
        p_max: upper clamp.
        ema: decay of a running average of :math:`a_t` that the controller looks at; 0 for :math:`a_t` itself.

    Raises:
        ValueError: values out of range.
    """

    state_bytes: Tensor

    def __init__(
        self,
        target: float,
        num_experts: int,
        kp: float = 0.1,
        ki: float = 0.1,
        p0: float | None = None,
        p_min: float = 1e-3,
        p_max: float = 1.0,
        ema: float = 0.0,
    ) -> None:
        super().__init__()
        num_experts = check_count("num_experts", num_experts)
        if not 1 <= target <= num_experts:
            raise ValueError(f"target must lie in [1, num_experts = {num_experts}], got {target}")
        for name, gain in (("kp", kp), ("ki", ki)):
            if not (math.isfinite(gain) and gain >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {gain}")
        if not 0 < p_min <= p_max <= 1:
            raise ValueError(f"p_min and p_max must satisfy 0 < p_min <= p_max <= 1, got {p_min} and {p_max}")
        if p0 is not None and not p_min <= p0 <= p_max:
            raise ValueError(f"p0 must lie in [p_min, p_max] = [{p_min}, {p_max}], got {p0}")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {ema}")
        self.target = target
        self.num_experts = num_experts
        self.kp = kp
        self.ki = ki
        self.start = p0
        self.p_min = p_min
        self.p_max = p_max
        self.ema = ema
        self.register_buffer("state_bytes", torch.empty(4 * 8, dtype=torch.uint8))
        self._active_and_rows = StepCounter(2)
        self._known_calibrated = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget everything learned: p at its start, no errors summed."""
        p = self._clamp(default_threshold(self.target, self.num_experts)) if self.start is None else self.start
        self._store(p, 0.0, math.nan if self.start is None else self.start, math.nan)
        self._known_calibrated = False

    def reset(self) -> None:
        """The same as :meth:`reset_parameters`."""
        self.reset_parameters()

    @property
    def threshold(self) -> Tensor:
        """p as a float64 scalar on the controller's device."""
        return self._state()[0]

    @property
    def p(self) -> float:
        """p as a number."""
        return float(self.threshold)

    @property
    def error_sum(self) -> float:
        """The summed errors."""
        return float(self._state()[1])

    @property
    def calibrated(self) -> bool:
        """Whether :math:`p_0` is known."""
        if not self._known_calibrated:
            self._known_calibrated = not bool(torch.isnan(self._state()[2]))
        return self._known_calibrated

    @torch.no_grad()
    def calibrate(self, probs_TE: Tensor) -> float:
        """Set :math:`p_0` and p to the mean mass of the T best experts (T rounded), over all ranks.

        Args:
            probs_TE: (T, E) probabilities of a batch; none leave everything as it was.

        Returns:
            p.

        Raises:
            ValueError: another number of experts; probabilities that are not finite. The state is unchanged then.
        """
        if probs_TE.dim() != 2 or probs_TE.shape[1] != self.num_experts:
            raise ValueError(f"probs_TE must have shape (T, {self.num_experts}), got {tuple(probs_TE.shape)}")
        best = max(1, round(self.target))
        mass = probs_TE.double().topk(best, dim=1).values.sum()
        rows = torch.tensor(float(probs_TE.shape[0]), dtype=torch.float64, device=mass.device)
        total, count = reduce_sum(torch.stack([mass, rows])).tolist()
        if count == 0:
            return self.p
        if not math.isfinite(total):
            raise ValueError("probs_TE holds NaN or inf; the controller is left as it was")
        p0 = self._clamp(1.0 if best == self.num_experts else total / count)
        self._store(p0, 0.0, p0, math.nan)
        return p0

    def update(self, mean_active: float) -> float:
        """Move p by the mean number of experts per row of one step.

        Args:
            mean_active: :math:`a_t`.

        Returns:
            p of the next step.

        Raises:
            ValueError: not a number in [0, E]; the state is unchanged then.
            RuntimeError: :math:`p_0` is not known yet.
        """
        if not (math.isfinite(mean_active) and 0 <= mean_active <= self.num_experts):
            raise ValueError(f"mean_active must lie in [0, num_experts = {self.num_experts}], got {mean_active}")
        if not self.calibrated:
            raise RuntimeError("update before any forward: give p0, or calibrate on a batch first")
        _, error_sum, p0, average = self._state().tolist()
        average = mean_active if math.isnan(average) else self.ema * average + (1 - self.ema) * mean_active
        error = (self.target - average) / self.num_experts
        error_sum = self._summed(error_sum, error, p0 + self.kp * error)
        p = self._clamp(p0 + self.kp * error + self.ki * error_sum)
        self._store(p, error_sum, p0, average)
        return p

    def observe(self, routing: Routing) -> None:
        """Count the filled slots and the real rows of ``routing``."""
        self._active_and_rows.add(torch.stack([routing.active_T.sum(), routing.real_T.sum()]))

    def end_step(self) -> None:
        """Move p by what was observed since the last call, over all ranks; it stays where nothing was."""
        active, rows = self._active_and_rows.drain(self.state_bytes.device).tolist()
        if rows:
            self.update(active / rows)

    def extra_repr(self) -> str:
        """Everything that the constructor was given."""
        start = "calibrated" if self.start is None else f"{self.start:g}"
        return (
            f"target={self.target:g} of {self.num_experts}, kp={self.kp:g}, ki={self.ki:g}, p0={start},"
            f" p=[{self.p_min:g}, {self.p_max:g}], ema={self.ema:g}"
        )

    def _summed(self, error_sum: float, error: float, rest: float) -> float:
        """The sum with ``error`` added, but no further than to where ``rest + ki * sum`` reaches a clamp."""
        summed = error_sum + error
        if self.ki == 0:
            return summed
        if error > 0:
            return min(summed, max(error_sum, (self.p_max - rest) / self.ki))
        return max(summed, min(error_sum, (self.p_min - rest) / self.ki))

    def _clamp(self, p: float) -> float:
        return min(max(p, self.p_min), self.p_max)

    def _state(self) -> Tensor:
        """(p, sum of errors, p0, running average of a) as float64."""
        return self.state_bytes.to(torch.uint8).view(torch.float64)

    def _store(self, *state: float) -> None:
        self.state_bytes.copy_(torch.tensor(state, dtype=torch.float64).view(torch.uint8))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._known_calibrated = False
        super()._load_from_state_dict(*args, **kwargs)


def default_threshold(target: float, num_experts: int) -> float:
    """Mass of the T best of E experts whose logits are the standardised quantiles of a normal distribution."""
    normal = NormalDist()
    quantiles = [normal.inv_cdf((index + 0.5) / num_experts) for index in range(num_experts)]
    spread = math.sqrt(math.fsum(q * q for q in quantiles) / num_experts) or 1.0
    masses = sorted((math.exp(q / spread) for q in quantiles), reverse=True)
    return math.fsum(masses[: max(1, round(target))]) / math.fsum(masses)
