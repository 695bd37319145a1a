"""Sizes and costs of multi-head latent layers."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.analysis.multi_head_cost import expert_parallel_bytes, head_parallel_bytes, multi_head_cost
from moesaic.experts import backend
from moesaic.layers import LatentMoEConfig, MultiHeadMoEConfig

CONFIG = MultiHeadMoEConfig(24, 3, 5, 2, 7)
BASE = LatentMoEConfig(64, 16, 4, 32, activation="gelu")


@pytest.mark.spec("multi-head-latent-moe", "6.11")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("head_size", [None, 6])
def test_formulas_equal_counts(streaming, separate, activation, head_size):
    config = dataclasses.replace(
        CONFIG,
        streaming=streaming,
        separate_routing_tokens=separate,
        activation=activation,
        head_size=head_size,
    )
    layer, cost, rows = config.build(), multi_head_cost(config), 10
    assert sum(p.numel() for p in layer.parameters()) == cost.params_total
    assert sum(w.numel() for w in layer.experts.weights().values()) == cost.total_expert_weights
    with FlopCounterMode(display=False) as counter, backend("reference"), torch.no_grad():
        layer(torch.randn(rows, 24))
    assert counter.get_total_flops() == rows * cost.flops_per_token


@pytest.mark.spec("multi-head-latent-moe", "6.11")
@pytest.mark.parametrize("granularity", [1, 2])
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_matched_sizes_have_equal_expert_weights(granularity, heads):
    config = MultiHeadMoEConfig.matched_to(BASE, heads, granularity)
    cost = multi_head_cost(config)
    assert cost.active_expert_weights == 4 * 2 * 64 * 32
    assert cost.total_expert_weights == 16 * 2 * 64 * 32
    assert (config.num_experts, config.top_k, config.expert_size) == (
        16 * granularity,
        4 * granularity,
        32 // granularity,
    )


@pytest.mark.spec("multi-head-latent-moe", "6.14")
@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_bytes_of_head_parallelism_do_not_depend_on_top_k(top_k):
    config = MultiHeadMoEConfig(64, 8, 16, top_k, 32)
    assert head_parallel_bytes(config, 1024, 4) == 393_216
    assert expert_parallel_bytes(dataclasses.replace(BASE, top_k=top_k), 1024, 4) == top_k * 393_216
    assert head_parallel_bytes(config, 1024, 1) == 0
    with pytest.raises(ValueError, match="world must divide num_heads = 8, got 3"):
        head_parallel_bytes(config, 1024, 3)
    with pytest.raises(ValueError, match="tokens"):
        head_parallel_bytes(config, 0, 4)


def test_routing_memory_by_formula():
    cost = multi_head_cost(MultiHeadMoEConfig(64, 4, 4096, 4, 8))
    assert cost.dense_routing_bytes >= 16 * cost.streaming_routing_bytes


def test_published_start():
    torch.manual_seed(0)
    layer = MultiHeadMoEConfig(64, 4, 16, 4, 32, init_std=0.02, num_layers=8).build()
    for name, parameter in layer.named_parameters():
        expected = 0.02 / 4 if name.endswith("merge_OHC") else 0.02
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.15), name


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 5}, "num_heads must divide hidden_size = 24"),
        ({"top_k": 6}, "top_k must be at most the 5"),
        ({"expert_size": 0}, "expert_size"),
        ({"activation": "tanh"}, "activation"),
        ({"backend": "flex"}, "backend"),
        ({"bias_rate": -1.0}, "bias_rate"),
    ],
)
def test_bad_sizes(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **change)


def test_bad_matches():
    with pytest.raises(ValueError, match="granularity must divide expert_size = 32, got 3"):
        MultiHeadMoEConfig.matched_to(BASE, 4, 3)
    with pytest.raises(ValueError, match="ordinary layer"):
        MultiHeadMoEConfig.matched_to(BASE.latent(4), 4)
