"""Small reference models for tests, and example arguments for every part that a configuration can name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from moesaic.models import MoesaicConfig, MoesaicForCausalLM
from moesaic.models.parts import ROUTERS

VOCABULARY = 24
# Values for arguments that parts require; a new part whose argument is not here fails its test by name.
REQUIRED = {"top_k": 2, "target": 2.0, "p": 0.5, "num_heads": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "expert_choice": {"grouping": "position"},
    "pair_choice": {"grouping": "causal"},
    "latent": {"compression": 2},
    "multi_head": {"streaming": False},
}
# Decisions of these depend on the other sequences of the batch.
BATCH_DEPENDENT = {"expert_choice"}


def example(table: dict[str, type[Any]], name: str) -> dict[str, Any]:
    """A specification of the part ``name`` with all that it requires beyond what the model gives."""
    spec: dict[str, Any] = {"name": name, **SPECIAL.get(name, {})}
    for parameter in list(inspect.signature(table[name].__init__).parameters.values())[1:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if needed and parameter.name not in {"dim", "num_experts", "width", "coefficient", *spec}:
            spec[parameter.name] = REQUIRED[parameter.name]
    return spec


def small_config(router: str | dict[str, Any] = "top_k", **changes: Any) -> MoesaicConfig:
    """Two MoE layers of four experts, width 16."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "expert_width": 12,
        "num_experts": 4,
        "router": example(ROUTERS, router) if isinstance(router, str) else router,
        "embedding_std": 1.0,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    return MoesaicConfig(**{**settings, **changes})


def small_model(router: str | dict[str, Any] = "top_k", seed: int = 0, **changes: Any) -> MoesaicForCausalLM:
    """A model of :func:`small_config` in evaluation mode; n-gram tables and shifts are not left at zero."""
    torch.manual_seed(seed)
    model = MoesaicForCausalLM(small_config(router, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("table_RD", "weight_JD")):
                parameter.normal_(0, 0.3)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random ids (B, S) without the padding id 0."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], side: str, pads_from: int = 3) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch (B, S) with random ids as padding, and its mask."""
    length = max(len(row) for row in rows)
    ids, mask = tokens(len(rows), length, pads_from), torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return ids, mask
