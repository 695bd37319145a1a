"""The scoring network: one expert per view reads its distance profile, and a gate weighs the experts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.formats.arguments import check_count
from moesaic.routing import Routing

_SLOPE = 0.2  # of every LeakyReLU, as in the authors' code
_RANK_STD = 0.01


class ViewScores(NamedTuple):
    """What the network says about rows.

    Args:
        score_T: (T,) in (0, 1), larger is more anomalous.
        logit_T: (T,) the same before the sigmoid: the weighted sum of the views' logits.
        logits_TE: (T, E) each view's own logit.
        routing: the gate's weights as a dense routing of rows over views.
        attention_TEK: (T, E, K) what each view's pooling weighs its neighbours with.
    """

    score_T: Tensor
    logit_T: Tensor
    logits_TE: Tensor
    routing: Routing
    attention_TEK: Tensor


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Everything that fixes the network's shape; the defaults are the paper's.

    Args:
        views: names of the views, one expert each.
        ranks: K, the longest profile that can be read.
        dim: D, width of a rank's token.
        hidden: width inside attention, scores and gate.
        temperature: of the gate's softmax, above 0. The authors' code has 0.4 where the paper's formula has none.
        gate: False fuses the views by their mean.
        shared_expert: True gives all views one expert.
        mean_pool: True pools the ranks by their mean instead of attention.
        rank_embed: False takes the rank embeddings away.

    Raises:
        ValueError: a size below 1, no views, a temperature that is not above 0.
    """

    views: tuple[str, ...] = ("raw", "std", "minmax", "quantile")
    ranks: int = 80
    dim: int = 128
    hidden: int = 64
    temperature: float = 0.4
    gate: bool = True
    shared_expert: bool = False
    mean_pool: bool = False
    rank_embed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "views", tuple(self.views))
        if not self.views:
            raise ValueError("views is empty; the network needs at least one view")
        for name in ("ranks", "dim", "hidden"):
            check_count(name, getattr(self, name))
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {**dataclasses.asdict(self), "views": list(self.views)}


class ViewExpert(nn.Module):
    r"""Reads one view's profile (arXiv:2603.14407, with the authors' code where the two differ).

    .. math::
        H_j = \mathrm{LeakyReLU}(\mathrm{LN}(w \hat d_j + b)) + P_j, \qquad
        \alpha = \mathrm{softmax}_j(v^\top \tanh(U H_j + u)), \qquad h = \sum_j \alpha_j H_j

    and a two-layer score of h. With fewer ranks than K the first rank embeddings are used.

    Args:
        config: the network's shape.

    Shapes:
        profile_TK -> pooled (T, D), logit (T,), attention (T, K).
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.lift = nn.Linear(1, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.rank_KD = nn.Parameter(_RANK_STD * torch.randn(config.ranks, config.dim)) if config.rank_embed else None
        self.attend = None if config.mean_pool else nn.Linear(config.dim, config.hidden)
        self.weigh = None if config.mean_pool else nn.Linear(config.hidden, 1, bias=False)
        self.score = _mlp(config.dim, config.hidden, 1)

    def forward(self, profile_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pooled features, view logit and attention over ranks."""
        h_TKD = F.leaky_relu(self.norm(self.lift(profile_TK[:, :, None])), _SLOPE)
        if self.rank_KD is not None:
            h_TKD = h_TKD + self.rank_KD[: profile_TK.shape[1]]
        if self.attend is None or self.weigh is None:
            attention_TK = torch.full_like(profile_TK, 1.0 / profile_TK.shape[1])
        else:
            attention_TK = self.weigh(torch.tanh(self.attend(h_TKD)))[:, :, 0].softmax(-1)
        h_TD = torch.einsum("tk,tkd->td", attention_TK, h_TKD)
        return h_TD, self.score(h_TD)[:, 0], attention_TK


class GatedViewMoE(nn.Module):
    r"""A dense mixture with one expert per view (arXiv:2603.14407).

    .. math:: s = \sigma\Big(\sum_m g_m s^{(m)}\Big), \qquad
        g = \mathrm{softmax}\big(\mathrm{MLP}([h^{(1)}; \dots; h^{(M)}]) / \tau\big).

    Args:
        config: the network's shape.
        seed: of the initial weights.

    Shapes:
        profile_TEK, (T, M, k) with k <= K -> :class:`ViewScores`.

    Raises:
        ValueError: a profile of another number of views, or longer than K.
    """

    def __init__(self, config: NetworkConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        check_count("seed", seed, 0)
        views = len(config.views)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.experts = nn.ModuleList(ViewExpert(config) for _ in range(1 if config.shared_expert else views))
            self.gate = _mlp(views * config.dim, config.hidden, views) if config.gate else None

    def forward(self, profile_TEK: Tensor) -> ViewScores:
        """Scores, views and weights of rows."""
        config = self.config
        if profile_TEK.dim() != 3 or profile_TEK.shape[1] != len(config.views):
            raise ValueError(
                f"profile_TEK has shape {tuple(profile_TEK.shape)}; it must be (T, {len(config.views)}, k)"
            )
        if not 1 <= profile_TEK.shape[2] <= config.ranks:
            raise ValueError(f"profile_TEK has {profile_TEK.shape[2]} ranks; this network reads 1..{config.ranks}")
        read = [self.experts[0 if config.shared_expert else e](profile_TEK[:, e]) for e in range(len(config.views))]
        logits_TE = torch.stack([logit_T for _, logit_T, _ in read], dim=1)
        if self.gate is None:
            gate_TE = torch.zeros_like(logits_TE)
        else:
            gate_TE = self.gate(torch.cat([h_TD for h_TD, _, _ in read], dim=1)) / config.temperature
        weights_TE = gate_TE.softmax(-1)
        logit_T = (weights_TE * logits_TE).sum(-1)
        # Dense gating: every view counts as used, also where its weight underflows to 0.
        routing = Routing.from_dense(weights_TE, torch.ones_like(weights_TE, dtype=torch.bool), logits_TE=gate_TE)
        attention_TEK = torch.stack([attention_TK for _, _, attention_TK in read], dim=1)
        return ViewScores(logit_T.sigmoid(), logit_T, logits_TE, routing, attention_TEK)


def _mlp(wide: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(wide, hidden), nn.LeakyReLU(_SLOPE), nn.Linear(hidden, out))
