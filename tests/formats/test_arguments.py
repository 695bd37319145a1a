"""Counts are whole numbers in range, everywhere: no public constructor takes 2.5 experts, True heads or -1 layers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moesaic.data.tokenize import Tokenizer
from moesaic.formats.arguments import check_count
from moesaic.formats.trace import TraceLayer, TraceWriter
from moesaic.tabular.network import NetworkConfig
from moesaic.tabular.training import SourceTask

SIZES = {"dim": 8, "num_experts": 4}
IDS = torch.zeros(1, 1, dtype=torch.int64)
SCORED = SourceTask(torch.zeros(2, 4, 80), torch.zeros(2))
# Class -> arguments that are valid, every count among them.
VALID: dict[str, dict[str, Any]] = {
    "data.packing.PackedTokens": {"tokens": np.arange(9), "seed": 1},
    "experts.base.Experts": {**SIZES, "out_dim": 8},
    "experts.ffn.FFNExperts": {**SIZES, "width": 4, "out_dim": 8},
    "experts.latent.InnerBank": {**SIZES, "width": 4, "out_dim": 8},
    "experts.latent.LatentExperts": {**SIZES, "width": 4, "latent_size": 4, "out_dim": 8},
    "experts.multi_head_latent.MultiHeadLatentExperts": {
        **SIZES,
        "width": 4,
        "num_heads": 2,
        "top_k": 2,
        "head_size": 4,
        "separate_routing_tokens": True,
        "routing_size": 4,
        "block_size": 4,
    },
    "experts.shared.SharedExpert": {"dim": 8, "width": 4, "out_dim": 8},
    "layers.attention.Attention": {"dim": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4},
    "layers.latent.LatentMoEConfig": {
        "hidden_size": 8,
        "num_experts": 4,
        "top_k": 2,
        "expert_size": 4,
        "latent_size": 4,
        "num_shared_experts": 1,
        "shared_expert_size": 4,
        "num_layers": 1,
    },
    "layers.multi_head_latent.MultiHeadMoEConfig": {
        "hidden_size": 8,
        "num_heads": 2,
        "num_experts": 4,
        "top_k": 2,
        "expert_size": 4,
        "head_size": 4,
        "num_layers": 1,
    },
    "layers.ngram.NgramEmbedding": {"dim": 8, "orders": (2,), "rows": 16, "min_count": 1},
    "layers.norm.Norm": {"dim": 8},
    "layers.shift.CausalShift": {"dim": 8, "places": 2},
    "models.configuration.MoesaicConfig": {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 8,
        "num_experts": 4,
        "expert_width": 4,
        "shift": 0,
        "max_position_embeddings": 16,
    },
    "routing.cosine.CosineRouter": {**SIZES, "top_k": 2, "routing_dim": 4},
    "routing.dynamic_top_p.DynamicTopPRouter": {**SIZES, "target": 2.0},
    "routing.dynamic_top_p.TopPRouter": {**SIZES, "p": 0.5},
    "routing.expert_choice.ExpertChoiceRouter": SIZES,
    "routing.multi_head.MultiHeadRouter": {**SIZES, "top_k": 2, "num_heads": 2, "tile": 4},
    "routing.pair_choice.PairChoiceRouter": SIZES,
    "routing.principal_subspace.PrincipalSubspaceRouter": {**SIZES, "top_k": 2, "basis_iters": 1},
    "routing.relu.L1Controller": {"num_experts": 4, "target": 2.0},
    "routing.relu.ReLURouter": {**SIZES, "target": 2.0},
    "routing.router.Router": SIZES,
    "routing.routing.Routing": {"expert_ids_TK": IDS, "weights_TK": torch.zeros(1, 1), "num_experts": 4},
    "routing.selection.TopKSelection": {**SIZES, "top_k": 2, "num_groups": 2, "top_groups": 2, "seed": 0},
    "routing.state.StepCounter": {"size": 2},
    "routing.subspace.GHASubspace": {"dim": 8, "num_components": 4, "iters": 1},
    "routing.threshold_controller.PIThresholdController": {"num_experts": 4, "target": 2.0},
    "routing.top_k.TopKRouter": {**SIZES, "top_k": 2},
    "tabular.network.GatedViewMoE": {"config": NetworkConfig(dim=4, hidden=4), "seed": 0},
    "tabular.network.NetworkConfig": {"ranks": 8, "dim": 4, "hidden": 4},
    "tabular.profiles.MultiViewDistanceEncoder": {"k": 4},
    "tabular.training.AnomalyScores": {"tables": [SCORED], "order": [0], "chunk_rows": 4},
    "training.config.AverageConfig": {"every": 1},
    "training.config.DataConfig": {"path": "shakespeare", "vocab_size": 300},
    "training.config.EarlyStoppingConfig": {"patience": 3},
    "training.config.MuonConfig": {"momentum_warmup": 1, "iterations": 5, "every": 1},
    "training.config.ScheduleConfig": {"warmup": 1},
    "training.config.StageConfig": {"until": 1.0, "batch": 2, "length": 2},
    "training.config.TrainConfig": {
        "steps": 1,
        "batch": 1,
        "length": 1,
        "accumulate": 1,
        "seed": 0,
        "log_every": 1,
        "eval_every": 1,
        "eval_batches": 1,
        "save_every": 1,
        "keep": 1,
    },
    "training.muon.Muon": {
        "params": [nn.Parameter(torch.zeros(2, 2))],
        "momentum_warmup": 1,
        "iterations": 5,
        "every": 1,
    },
}
# Checked below: one in fit, as scikit-learn wants it, one that needs a folder.
CHECKED_BELOW = {"tabular.detector.OneForAllDetector", "formats.trace.TraceWriter"}
# Made by the library from its own numbers, never by a user.
MADE_BY_US = {
    *("analysis.moe_cost.MoECost", "analysis.multi_head_cost.MultiHeadCost", "analysis.statistics.LayerStatistics"),
    *("analysis.statistics.ParameterCount", "analysis.statistics.RoutingStatistics", "data.download.DataFile"),
    *("data.packing.Batch", "experts.packing.Packing", "formats.checkpoint.Checkpoint", "models.exporting.Exported"),
    *("formats.trace.TraceCall", "formats.trace.TraceLayer"),
    *(
        "models.block.MoesaicBlock",
        "models.handle.MoELayer",
        "models.history.History",
        "models.modeling.Head",
        "models.saving.Saved",
    ),
    *("models.expert_index.ExpertTensor", "models.surgery.IndexMap", "models.surgery.LayerChange"),
    *("models.surgery_checks.GroupLimit", "routing.dispatch.Dispatch", "training.diagnosis.NonFiniteError"),
    *("training.report.TrainReport", "training.run_state.Position", "training.statistics.UnmovedExpert"),
    *("training.task.Step", "training.task.Evaluation"),
}
# Numbers that are no counts: -1 is one of joblib's, a token's id is a name, the rest is transformers' own.
NO_COUNT = {"n_jobs", "pad_token_id", "bos_token_id", "eos_token_id", "chunk_size_feed_forward", "moesaic_format"}
LESS_THAN_WHOLE: list[Any] = [2.5, 2.0, float("nan"), True, np.bool_(True), -1, "2", torch.tensor(2.5)]


def counting_classes() -> dict[str, type]:
    """Public classes with an argument that is annotated as an int, by module and name."""
    import moesaic.models.modeling

    found = {}
    for module in pkgutil.walk_packages(moesaic.__path__, "moesaic."):
        parts = module.name.split(".")
        if parts[1] in ("cli", "experiments", "__main__") or "adapters" in parts or parts[-1] == "pyod_wrapper":
            continue
        home = importlib.import_module(module.name)
        for name, kind in vars(home).items():
            ours = inspect.isclass(kind) and kind.__module__ == home.__name__ and not name.startswith("_")
            if ours and counts_of(kind):
                found[f"{module.name.removeprefix('moesaic.')}.{name}"] = kind
    return found


def counts_of(kind: type) -> list[str]:
    """Names of the arguments of a class that are counts."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    ints = ("int", "int | None", "<class 'int'>")
    return [p.name for p in parameters if str(p.annotation) in ints and p.name not in NO_COUNT]


CLASSES = counting_classes()


def test_the_table_holds_every_class_that_takes_a_count() -> None:
    assert set(CLASSES) == set(VALID) | CHECKED_BELOW | MADE_BY_US


@pytest.mark.parametrize("name", VALID)
def test_constructors_refuse_counts_that_are_none(name: str) -> None:
    kind, arguments = CLASSES[name], VALID[name]
    kind(**arguments)
    for count in counts_of(kind):
        if count == "compression":
            continue  # instead of latent_size, below
        assert count in arguments, f"{count} of {name} is missing in the table"
        for bad in LESS_THAN_WHOLE:
            refused(count, bad, lambda bad=bad, count=count: kind(**{**arguments, count: bad}))


def refused(name: str, bad: Any, call: Callable[[], Any]) -> None:
    """``call`` raises a ValueError that says which argument and which value."""
    with pytest.raises(ValueError, match=name) as error:
        call()
    assert repr(bad) in str(error.value) or str(bad) in str(error.value), str(error.value)


def test_the_other_ways_in_refuse_them_too(tmp_path: Path) -> None:
    from moesaic import FFNExperts, MoesaicConfig, TopKRouter
    from moesaic.experts import LatentExperts
    from moesaic.models.modeling import MoesaicForCausalLM
    from moesaic.tabular import OneForAllDetector, pretrain

    rows = np.random.default_rng(0).normal(size=(9, 2))
    for bad in LESS_THAN_WHOLE:
        refused("compression", bad, lambda bad=bad: LatentExperts(8, 4, 4, compression=bad))
        refused("n_neighbors", bad, lambda bad=bad: OneForAllDetector(n_neighbors=bad).fit(rows))
        refused("shard_slots", bad, lambda bad=bad: TraceWriter(tmp_path, [TraceLayer(0, "a", 4)], shard_slots=bad))
        refused("epochs", bad, lambda bad=bad: pretrain([rows], epochs=bad))
        refused("vocab_size", bad, lambda bad=bad: Tokenizer.train("bpe", ["text"], vocab_size=bad))
        refused("widths", bad, lambda bad=bad: FFNExperts(8, 4, 2, widths=(2, bad)))
        refused("num_groups", bad, lambda bad=bad: TopKRouter(8, 4, 2, num_groups=bad))
        if not isinstance(bad, torch.Tensor):
            config = MoesaicConfig(hidden_size=8, num_attention_heads=2, router={"name": "top_k", "top_k": bad})
            refused("top_k", bad, lambda config=config: MoesaicForCausalLM(config))


@given(st.integers(min_value=1, max_value=2**40))
def test_integers_of_any_kind_are_taken_as_ints(value: int) -> None:
    for kind in (int, np.int64):
        assert type(check_count("n", kind(value))) is int
        assert check_count("n", kind(value)) == value
    assert check_count("n", value, most=value) == value


def test_messages_name_argument_value_and_range() -> None:
    for call, said in (
        (lambda: check_count("top_k", 2.5), "top_k must be an integer, at least 1, got 2.5"),
        (
            lambda: check_count("top_k", 9, 1, 8, "num_experts = 8"),
            "top_k must be between 1 and num_experts = 8, got 9",
        ),
        (lambda: check_count("shift", -1, 0), "shift must be at least 0, got -1"),
        (lambda: check_count("iterations", True, 1, 8), "iterations must be an integer, between 1 and 8, got True"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            call()
