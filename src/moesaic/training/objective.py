"""What a step minimises: the language-model loss over the step's tokens and the model's auxiliary losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.data.packing import Batch
from moesaic.routing import Routing


@dataclass(frozen=True, eq=False)
class MicroLoss:
    """Loss of one micro-batch.

    Attributes:
        lm_sum: sum over targets of the negative log-likelihood in nats, a scalar.
        aux: sum over layers of the auxiliary losses, coefficients included, a scalar; None without any.
        routings: one per MoE layer, where the model gives them.
    """

    lm_sum: Tensor
    aux: Tensor | None = None
    routings: Sequence[Routing] = ()


Objective = Callable[[nn.Module, Batch], MicroLoss]


def causal_lm(model: nn.Module, batch: Batch) -> MicroLoss:
    """Next-token prediction for any transformers-like causal model.

    The loss is formed here and not in the model, so that it can be divided by the targets of the whole step. A model of
    ours returns its routings, whose losses are the auxiliary loss; other models train without one.

    Args:
        model: ``model(input_ids=..., attention_mask=...)`` with ``.logits`` (B, S, V).
        batch: inputs and the tokens that follow them.
    """
    arguments: dict[str, object] = {"input_ids": batch.inputs_BS}
    if batch.mask_BS is not None:
        arguments["attention_mask"] = batch.mask_BS
    accepted = _accepted(model)
    if "output_routings" in accepted:
        arguments["output_routings"] = True
    if "use_cache" in accepted:
        arguments["use_cache"] = False
    output = model(**arguments)
    logits_TV = output.logits.flatten(0, 1).float()
    lm_sum = F.cross_entropy(logits_TV, batch.targets_BS.reshape(-1), ignore_index=-100, reduction="sum")
    routings = tuple(getattr(output, "routings", None) or ())
    return MicroLoss(lm_sum, _auxiliary(output, routings), routings)


def step_loss(loss: MicroLoss, batch: Batch, step_targets: int, lm: float = 1.0, aux: float = 1.0) -> Tensor:
    r"""The part of the step's loss that this micro-batch contributes.

    .. math:: \frac{\text{lm} \cdot \sum_{t \in i} \ell_t + \text{aux} \cdot n_i A_i}{\sum_j n_j}

    with :math:`n_i` targets and the auxiliary loss :math:`A_i` of micro-batch :math:`i`: the mean over all tokens of
    the step, and the token-weighted mean of the auxiliary losses. The same micro-batch four times gives the gradient
    of one.

    Args:
        loss: of the micro-batch.
        batch: the micro-batch.
        step_targets: targets of the whole step.
        lm: factor on the language-model loss.
        aux: factor on the auxiliary losses.
    """
    total = loss.lm_sum * (lm / step_targets)
    if loss.aux is not None and aux:
        total = total + loss.aux * (aux * batch.num_targets / step_targets)
    return total


def auxiliary_terms(routings: Sequence[Routing]) -> dict[str, Tensor]:
    """Sum over layers of each auxiliary loss, name -> scalar without gradient."""
    terms: dict[str, Tensor] = {}
    for routing in routings:
        for name, value in routing.losses.items():
            terms[name] = terms[name] + value.detach() if name in terms else value.detach()
    return terms


def _auxiliary(output: object, routings: Sequence[Routing]) -> Tensor | None:
    given = getattr(output, "aux_loss", None)
    if isinstance(given, Tensor):
        return given
    values = [value for routing in routings for value in routing.losses.values()]
    return torch.stack(values).sum() if values else None


def _accepted(model: nn.Module) -> frozenset[str]:
    """Argument names of a model's forward (of the model inside, when it is compiled)."""
    inner = getattr(model, "_orig_mod", model)
    return frozenset(inspect.signature(inner.forward).parameters)
