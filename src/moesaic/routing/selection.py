"""The K best experts of each row: what routers share that differ only in how they score."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.formats.arguments import check_count
from moesaic.routing.context import Context
from moesaic.routing.router import Router, top_k_lower_index
from moesaic.routing.routing import Routing, gather_slots
from moesaic.routing.state import StepCounter

SCORES = ("softmax", "sigmoid")


class TopKSelection(Router):
    r"""Base of routers that send each row to its K best experts; subclasses write :meth:`score`.

    With scores :math:`s_{t,e}` (softmax over all experts, or sigmoid, of the logits) row t goes to

    .. math:: S_t = \mathrm{top}K_e\,(s_{t,e} + b_e), \qquad
              w_{t,e} = c\, s_{t,e} \quad\text{or}\quad w_{t,e} = c\, s_{t,e} / \sum_{j \in S_t} s_{t,j},

    best first, ties to the lower index. The bias :math:`b` chooses and does not weigh (loss-free balancing,
    arXiv:2408.15664); once per optimizer step it moves by ``bias_rate`` towards balance,
    :math:`b_e \mathrel{+}= u\,\mathrm{sign}(\bar n - n_e)`, with the load :math:`n_e` of the step over all
    micro-batches and ranks; the mean of the moves is taken off, so the mean of the bias stays.

    Group-limited selection (DeepSeek-V3, arXiv:2412.19437): experts lie in ``num_groups`` equal groups; a group scores
    the sum of its two best :math:`s + b`, and only experts of the ``top_groups`` best groups can be chosen.

    Noise (noisy top-k, arXiv:1701.06538) is added to the logits for choosing only and in training only. It is drawn
    from (``seed``, optimizer step, ``layer_index``), so a recomputed block, every micro-batch and every rank draw the
    same.

    Args:
        dim: model width D.
        num_experts: E.
        top_k: K, experts per row.
        score: ``"softmax"`` or ``"sigmoid"``.
        renormalize: divide the chosen scores by their sum; None means where K > 1.
        scale: constant c of the weights.
        bias: keep a selection bias, the float32 buffer ``selection_bias_E``.
        bias_rate: u; 0 holds the bias still.
        num_groups: groups of experts; 1 switches group-limited selection off.
        top_groups: groups that a row may use.
        noise_std: standard deviation of the noise, in units of logits.
        seed: of the noise.

    Shapes:
        x_TD -> Routing (T, K).

    Raises:
        ValueError: K outside [1, E]; renormalised weights with K = 1 (the weight would always be ``scale`` and the
            router would get no gradient); groups that do not divide E or hold fewer than K experts; values out
            of range.
    """

    selection_bias_E: Tensor
    noise_step: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        bias: bool = False,
        bias_rate: float = 1e-3,
        num_groups: int = 1,
        top_groups: int = 1,
        noise_std: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(dim, num_experts)
        top_k = check_count("top_k", top_k, 1, num_experts, f"num_experts = {num_experts}")
        if score not in SCORES:
            raise ValueError(f"score must be one of {SCORES}, got {score!r}")
        if renormalize and top_k == 1:
            raise ValueError(
                "renormalize=True with top_k=1 makes every weight the same constant, so the router gets no gradient and"
                " cannot learn: use renormalize=False, or top_k >= 2"
            )
        if not math.isfinite(scale) or scale == 0:
            raise ValueError(f"scale must be finite and not 0, got {scale}")
        for name, value in (("bias_rate", bias_rate), ("noise_std", noise_std)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        check_groups(num_experts, top_k, num_groups, top_groups)
        self.top_k = top_k
        self.score_function = score
        self.renormalize = top_k > 1 if renormalize is None else renormalize
        self.scale = scale
        self.bias_rate = bias_rate
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.noise_std = noise_std
        self.seed = check_count("seed", seed, 0)
        self.has_bias = bias
        if bias:
            self.register_buffer("selection_bias_E", torch.zeros(num_experts, dtype=torch.float32))
        if noise_std > 0:
            self.register_buffer("noise_step", torch.zeros((), dtype=torch.int64))
        self._load = StepCounter(num_experts)

    def reset_parameters(self) -> None:
        """Set parameters and buffers to their start values, also after a build on the meta device."""
        if self.has_bias:
            self.selection_bias_E.zero_()
        if self.noise_std > 0:
            self.noise_step.zero_()

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        """The K best experts of each row among the allowed ones, best first; see the class.

        With groups, a group that lost all but one of its experts scores that one; one that lost all is never chosen.
        """
        logits_TE = logits_TE.detach()
        scores_TE = self.selection_scores(logits_TE if allowed_TE is None else self.restrict(logits_TE, allowed_TE))
        if allowed_TE is not None:  # again: a bias on a score of 0 is more than -inf
            scores_TE = scores_TE.masked_fill(~allowed_TE, -torch.inf)
        if self.num_groups > 1:
            scores_TE = keep_best_groups(scores_TE, self.num_groups, self.top_groups)
        ids_TK = top_k_lower_index(scores_TE, self.top_k)
        if allowed_TE is not None:
            ids_TK = ids_TK.masked_fill(scores_TE.gather(1, ids_TK) == -torch.inf, self.num_experts)
        return ids_TK

    def selection_scores(self, logits_TE: Tensor) -> Tensor:
        """(T, E) what the choice compares: noisy scores plus bias.

        Without bias and groups these are the logits: they order experts as the scores do, and still do so where scores
        saturate and round to equal numbers.
        """
        if self.noise_std > 0 and self.training:
            logits_TE = logits_TE + self._noise(logits_TE)
        if not self.has_bias and self.num_groups == 1:
            return logits_TE
        scores_TE = self.scores(logits_TE)
        return scores_TE + self.selection_bias_E.to(scores_TE.dtype) if self.has_bias else scores_TE

    def scores(self, logits_TE: Tensor) -> Tensor:
        """(T, E) softmax or sigmoid of the logits: what weights are made of."""
        return logits_TE.softmax(-1) if self.score_function == "softmax" else logits_TE.sigmoid()

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        """Scores of the chosen experts, renormalised or not, times the scale; see the class."""
        picked_TK = gather_slots(self.scores(logits_TE), ids_TK)
        if self.renormalize:
            total_T1 = picked_TK.sum(-1, keepdim=True)
            picked_TK = picked_TK / torch.where(total_T1 > 0, total_T1, 1.0)  # only an empty row sums to 0
        return picked_TK * self.scale if self.scale != 1.0 else picked_TK

    def observe(self, routing: Routing) -> None:
        """Count loads for the bias."""
        if self.has_bias and self.bias_rate > 0:
            self._load.add(routing.load_E)

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the selection bias by the load of the step, and go on to the next noise."""
        if self.has_bias and self.bias_rate > 0:
            load_E = self._load.drain(self.selection_bias_E.device)
            self.selection_bias_E += loss_free_move(load_E, self.bias_rate)
        if self.noise_std > 0:
            self.noise_step += 1

    def _noise(self, logits_TE: Tensor) -> Tensor:
        # Three odd constants of about 62 bits: neighbours in seed, step or layer get unrelated streams.
        mixed = (
            self.seed * 0x2545F4914F6CDD1D
            + int(self.noise_step) * 0x1E3779B97F4A7C15
            + self.layer_index * 0x3C6EF372FE94F82B
        )
        generator = torch.Generator(device=logits_TE.device).manual_seed(mixed % 2**63)
        noise = torch.randn(logits_TE.shape, generator=generator, device=logits_TE.device, dtype=logits_TE.dtype)
        return noise * self.noise_std

    def extra_repr(self) -> str:
        """What tells two routers apart in a printed model."""
        rule = f"{self.dim} -> {self.num_experts}, top_k={self.top_k}, {self.score_function}"
        return f"{rule}, renormalize={self.renormalize}, scale={self.scale:g}, bias={self.has_bias}"


def check_groups(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    """Refuse groups that do not fit.

    Raises:
        ValueError: see :class:`TopKSelection`.
    """
    check_count("num_groups", num_groups)
    check_count("top_groups", top_groups)
    if num_experts % num_groups:
        raise ValueError(f"num_groups must divide num_experts = {num_experts}, got {num_groups}")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups must be between 1 and num_groups = {num_groups}, got {top_groups}")
    available = top_groups * (num_experts // num_groups)
    if top_k > available:
        raise ValueError(
            f"top_k = {top_k} experts cannot come from top_groups = {top_groups} groups of {available} experts"
        )


def keep_best_groups(scores_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """``scores_TE`` with -inf outside each row's best groups: those with the largest sum of their two best scores.

    Args:
        scores_TE: (T, E) scores for choosing, -inf for experts that may not be chosen.
        num_groups: equal groups of neighbouring experts.
        top_groups: groups kept.
    """
    rows, experts = scores_TE.shape
    size = experts // num_groups
    grouped = scores_TE.reshape(rows, num_groups, size)
    best = grouped.sort(dim=-1, descending=True).values[..., : min(2, size)]
    group_scores = best.masked_fill(best == -torch.inf, 0.0).sum(-1)
    group_scores = group_scores.masked_fill(best[..., 0] == -torch.inf, -torch.inf)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept = kept.scatter(1, top_k_lower_index(group_scores, top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).reshape(rows, experts)


def loss_free_move(load_GE: Tensor, rate: float) -> Tensor:
    r"""How loss-free balancing moves selection biases, :math:`u\,(\delta - \bar\delta)`,
    :math:`\delta = \mathrm{sign}(\bar n - n)` (arXiv:2408.15664).

    Args:
        load_GE: (..., E) int64 loads n of the experts that compete.
        rate: u.

    Returns:
        float32, of the shape of ``load_GE``.
    """
    # The sign in integers: exactly 0 at exactly the mean.
    sign_GE = torch.sign(load_GE.sum(-1, keepdim=True) - load_GE.shape[-1] * load_GE).to(torch.float32)
    return rate * (sign_GE - sign_GE.mean(-1, keepdim=True))
