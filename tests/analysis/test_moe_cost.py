"""The cost model gives the paper's numbers."""

import dataclasses
import math

import pytest

from moesaic.analysis.moe_cost import (
    GB200,
    Hardware,
    arithmetic_intensity,
    communication_to_compute,
    compute_bound_tokens,
    effective_parameter_multiplier,
    moe_cost,
)
from moesaic.layers import LatentMoEConfig

LAYERS = 32
BASE = LatentMoEConfig(4096, 128, 6, 2688, num_shared_experts=2, activation="relu2")


@pytest.mark.spec("latent-moe", "6.5")
def test_parameter_counts_of_the_95b_run():
    base, eff = moe_cost(BASE, 1), moe_cost(BASE.latent(4, "eff"), 1)
    acc, matched = moe_cost(BASE.latent(4, "acc"), 1), moe_cost(BASE.latent(4, "acc", "matched"), 1)
    assert LAYERS * base.params_routed == LAYERS * acc.params_routed == 90_194_313_216
    router = 384 * 4096
    drop = 6 * 2 * 2688 * (4096 - 1024) - 2 * 4096 * 1024 - router
    assert base.params_active - eff.params_active == drop
    assert 8.47e9 - LAYERS * drop == pytest.approx(5.62e9, abs=0.02e9)
    assert 8.47e9 + LAYERS * (matched.params_active - base.params_active) == pytest.approx(8.44e9, abs=0.02e9)
    # Totals grow by the projections and the router: 94.4B -> 94.8B.
    assert 94.4e9 + LAYERS * (acc.params_total - base.params_total) == pytest.approx(94.8e9, abs=0.1e9)
    # alpha K itself is dearer than the baseline.
    assert acc.params_active > base.params_active > matched.params_active


@pytest.mark.spec("latent-moe", "6.7")
def test_roofline_of_qwen3_235b():
    assert abs(compute_bound_tokens(4096, 1536) - 1418) < 1
    assert arithmetic_intensity(compute_bound_tokens(4096, 1536), 4096, 1536) == pytest.approx(1250)
    assert communication_to_compute(1536) == pytest.approx(9.04, abs=0.01)
    assert compute_bound_tokens(16, 16) == math.inf


@pytest.mark.spec("latent-moe", "6.9")
@pytest.mark.parametrize("devices", [2, 8, 32])
def test_all_to_all_bytes(devices):
    base, eff, acc = (
        moe_cost(config, 8192, devices=devices).all_to_all_bytes
        for config in (BASE, BASE.latent(4, "eff"), BASE.latent(4, "acc"))
    )
    assert base == 2.5 * 8192 * 6 * 4096 / devices
    assert eff == base / 4 and acc == base


def test_what_binds_by_regime():
    few = moe_cost(BASE, 4, bytes_per_element=0.5)
    assert few.bound == "memory"
    assert moe_cost(BASE.latent(4, "eff"), 4, bytes_per_element=0.5).seconds["memory"] < 0.5 * few.seconds["memory"]
    assert moe_cost(BASE, 10**6, devices=32, bytes_per_element=0.5).bound == "communication"
    assert moe_cost(BASE, 10**7, bytes_per_element=0.5).bound == "compute"
    assert few.arithmetic_intensity < GB200.flops / GB200.memory_bandwidth
    # All experts are read once every one of them has tokens, never more.
    assert moe_cost(BASE, 10**6).expert_weight_bytes == pytest.approx(2 * moe_cost(BASE, 1).params_routed)
    assert moe_cost(BASE, 1).expert_weight_bytes == pytest.approx(2 * 6 * 2 * 4096 * 2688)
    full = dataclasses.replace(BASE, top_k=128)
    assert moe_cost(full, 1).expert_weight_bytes == 2 * moe_cost(full, 1).params_routed


def test_effective_parameter_multiplier():
    sizes = [1e9, 2e9, 4e9, 8e9]
    scores = [10 + 3 * math.log(n / 1e9) for n in sizes]
    assert effective_parameter_multiplier(sizes, scores, 10 + 3 * math.log(2.7), 2e9) == pytest.approx(1.35)
    assert effective_parameter_multiplier(sizes, scores, scores[1], sizes[1]) == pytest.approx(1)
    with pytest.raises(ValueError, match="two different sizes"):
        effective_parameter_multiplier([1e9, 1e9], [1, 2], 1, 1e9)
    with pytest.raises(ValueError, match="do not change with size"):
        effective_parameter_multiplier(sizes, [1, 1, 1, 1], 1, 1e9)
    with pytest.raises(ValueError, match="positive"):
        effective_parameter_multiplier(sizes, scores, 1, 0)


def test_bad_numbers():
    with pytest.raises(ValueError, match="devices must divide num_experts = 128, got 3"):
        moe_cost(BASE, 8, devices=3)
    for name, bad in (("tokens", 0), ("tokens", 2.5), ("devices", True)):
        with pytest.raises(ValueError, match=f"{name} must be .*at least 1, got {bad}"):
            moe_cost(BASE, **({"tokens": 8} | {name: bad}))
    for name in ("bytes_per_element", "exchange_bytes"):
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            moe_cost(BASE, **({"tokens": 8} | {name: 0}))
    with pytest.raises(ValueError, match="link_bandwidth"):
        Hardware(1, 1, 0)
