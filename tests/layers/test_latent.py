"""Sizes of latent layers, their arithmetic, and the conversion of a trained layer."""

import dataclasses
import math

import pytest
import torch

from moesaic.experts import FFNExperts, SharedExpert
from moesaic.layers import LatentMoEConfig, MoE, compress_moe, matched_top_k
from moesaic.routing import TopKRouter

# The 95B / 8B-active run of the paper: 32 layers, of which this is one.
PAPER = LatentMoEConfig(4096, 128, 6, 2688, num_shared_experts=2, activation="relu2")


def test_variants():
    sizes = lambda config: (config.latent_size, config.num_experts, config.top_k, config.expert_size)  # noqa: E731
    assert sizes(PAPER.latent(4, "acc")) == (1024, 512, 24, 2688)
    assert sizes(PAPER.latent(4, "eff")) == (1024, 512, 6, 2688)
    assert sizes(PAPER.latent(4, "no_expert_scaling")) == (1024, 128, 6, 2688)
    assert PAPER.latent(4, "acc").shared_width == PAPER.shared_width == 2 * 2688
    assert LatentMoEConfig.from_baseline(4096, 128, 6, 2688, 2, activation="relu2") == PAPER.latent(4)


@pytest.mark.spec("latent-moe", "6.5")
def test_matched_top_k_is_the_published_one():
    assert PAPER.latent(4, "acc", "matched").top_k == matched_top_k(PAPER, 1024, 512) == 22
    gated = dataclasses.replace(PAPER, activation="swiglu")
    assert matched_top_k(gated, 1024, 512) == (3 * 6 * 4096 * 2688 - 2 * 4096 * 1024 - 384 * 4096) // (3 * 1024 * 2688)
    # Never dearer than the ordinary layer; one expert more would be.
    from moesaic.analysis.moe_cost import moe_cost

    for config in (PAPER, gated, LatentMoEConfig(64, 8, 2, 64, activation="relu2")):
        matched = config.latent(4, "acc", "matched")
        more = dataclasses.replace(matched, top_k=matched.top_k + 1)
        base = moe_cost(config, 1).params_active
        assert moe_cost(matched, 1).params_active <= base < moe_cost(more, 1).params_active


@pytest.mark.spec("latent-moe", "6.8")
def test_growing_experts_and_top_k_enlarges_the_space_of_combinations():
    base = LatentMoEConfig(64, 8, 2, 64)
    wide = base.latent(4, "acc")
    assert math.comb(wide.num_experts, wide.top_k) == 10_518_300
    assert math.comb(base.num_experts, base.top_k) ** 4 == 614_656
    for experts in range(1, 9):
        for top_k in range(1, experts + 1):
            grown = LatentMoEConfig(64, experts, top_k, 8).latent(4)
            assert math.comb(grown.num_experts, grown.top_k) >= math.comb(experts, top_k) ** 4


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"top_k": 129}, "top_k must be at most num_experts = 128"),
        ({"top_k": 0}, "top_k"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"expert_size": -1}, "expert_size"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"latent_size": 5000}, "latent_size"),
        ({"activation": "squared"}, "activation"),
        ({"balance": -1.0}, "balance"),
    ],
)
def test_bad_sizes(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(PAPER, **changes)


def test_bad_variants():
    with pytest.raises(ValueError, match="variant must be one of"):
        PAPER.latent(4, "fast")
    with pytest.raises(ValueError, match="top_k_rule"):
        PAPER.latent(4, "acc", "half")
    with pytest.raises(ValueError, match="divisor"):
        PAPER.latent(3)
    with pytest.raises(ValueError, match="latent already"):
        PAPER.latent(4).latent(4)
    with pytest.raises(ValueError, match="nothing is left"):
        LatentMoEConfig(64, 64, 1, 2, activation="relu2").latent(2, "acc", "matched")
    with pytest.raises(ValueError, match="score"):
        dataclasses.replace(PAPER, hidden_size=8, expert_size=2, router_score="relu").build()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_built_layer_trains_with_loss_and_bias(score):
    torch.manual_seed(0)
    config = LatentMoEConfig(16, 4, 2, 8, activation="relu2", router_score=score, bias_rate=1e-3, balance=1e-4)
    layer = config.latent(4).build()
    y, routing = layer(torch.randn(20, 16))
    assert set(routing.losses) == {"balance"} and routing.slots == 8
    (y.square().sum() + sum(routing.losses.values())).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    layer.router.end_step()
    assert layer.router.selection_bias_E.any()


def trained(rank: int, bias: bool, activation: str = "swiglu") -> MoE:
    """A layer whose experts read and write ``rank`` directions."""
    torch.manual_seed(1)
    bank = FFNExperts(12, 7, 5, activation=activation, bias=bias)
    with torch.no_grad():
        read, write = torch.randn(12, rank), torch.randn(12, rank)
        for name, weight in bank.weights().items():
            if name in ("gate", "up"):
                weight.copy_(torch.randn(5, 7, rank) @ read.t() / 4)
            elif name == "down":
                weight.copy_(write @ torch.randn(5, rank, 7) / 4)
            elif name == "down_bias":
                weight.copy_(torch.randn(5, rank) @ write.t())
            else:
                weight.normal_()
    return MoE(bank, TopKRouter(12, 5, 2), SharedExpert(12, 4))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_conversion_is_exact_where_the_rank_allows(bias, activation):
    moe, x = trained(4, bias, activation), torch.randn(30, 12)
    found = compress_moe(moe, compression=3)
    assert found.kept_input == pytest.approx(1) and found.kept_output == pytest.approx(1)
    torch.testing.assert_close(found.layer(x)[0], moe(x)[0], rtol=1e-4, atol=1e-5)
    # Below the rank something is lost, and said.
    rough = compress_moe(moe, 2)
    assert 0.3 < rough.kept_input < 0.999
    assert (rough.layer(x)[0] - moe(x)[0]).abs().max() > 1e-3
    # The old layer is untouched and shares nothing with the new one.
    assert not {p.data_ptr() for p in moe.parameters()} & {p.data_ptr() for p in found.layer.parameters()}


def test_conversion_keeps_most_of_any_layer_with_wider_latents():
    torch.manual_seed(0)
    moe, x = MoE(FFNExperts(12, 7, 5), TopKRouter(12, 5, 2)), torch.randn(200, 12)
    y = moe(x)[0]
    errors = [float((compress_moe(moe, size).layer(x)[0] - y).square().mean()) for size in (3, 6, 9, 12)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-10
    with pytest.raises(ValueError, match="FFNExperts"):
        compress_moe(compress_moe(moe, 6).layer)
