"""The gated mixture of views: gate limits, ablations, routing."""

import dataclasses

import pytest
import torch

from moesaic.tabular import GatedViewMoE, NetworkConfig

CONFIG = NetworkConfig(ranks=12, dim=8, hidden=6)


def profiles(rows: int = 6, ranks: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.rand((rows, 4, ranks), generator=torch.Generator().manual_seed(seed)).sort(-1).values


def with_temperature(temperature: float) -> GatedViewMoE:
    return GatedViewMoE(dataclasses.replace(CONFIG, temperature=temperature)).double()


@pytest.mark.spec("ofa-tad", "6.7")
def test_gate_weights_sum_to_one_and_are_a_routing():
    out = GatedViewMoE(CONFIG)(profiles())
    weights_TE = out.routing.weights_TE
    torch.testing.assert_close(weights_TE.sum(1), torch.ones(6))
    torch.testing.assert_close(weights_TE, out.routing.probs_TE)
    assert out.routing.load_E.tolist() == [6] * 4
    torch.testing.assert_close(out.score_T, (weights_TE * out.logits_TE).sum(1).sigmoid())
    torch.testing.assert_close(out.attention_TEK.sum(-1), torch.ones(6, 4))


@pytest.mark.spec("ofa-tad", "6.7")
def test_hot_gate_is_the_mean_and_cold_gate_the_best_view():
    x = profiles().double()
    hot = with_temperature(1e9)(x)
    torch.testing.assert_close(hot.logit_T, hot.logits_TE.mean(1))
    mean = GatedViewMoE(dataclasses.replace(CONFIG, gate=False)).double()
    mean.load_state_dict({k: v for k, v in with_temperature(1.0).state_dict().items() if not k.startswith("gate")})
    torch.testing.assert_close(mean(x).logit_T, hot.logit_T)
    cold = with_temperature(1e-9)(x)
    best_T = cold.routing.logits_TE.argmax(1, keepdim=True)
    torch.testing.assert_close(cold.logit_T, cold.logits_TE.gather(1, best_T)[:, 0])
    assert cold.routing.mask_TE.all()


@pytest.mark.spec("ofa-tad", "6.8")
def test_equal_views_and_shared_experts_make_the_gate_irrelevant():
    shared = GatedViewMoE(dataclasses.replace(CONFIG, shared_expert=True)).double()
    x = profiles()[:, :1].expand(-1, 4, -1).double()
    out = shared(x)
    torch.testing.assert_close(out.logit_T, out.logits_TE[:, 0])
    assert out.routing.weights_TE.std() > 0


@pytest.mark.spec("ofa-tad", "6.10")
def test_short_profiles_use_the_first_rank_embeddings():
    network = GatedViewMoE(CONFIG)
    x = profiles(ranks=2)
    before = network(x).logit_T
    with torch.no_grad():
        for expert in network.experts:
            expert.rank_KD[2:] += 100
    torch.testing.assert_close(network(x).logit_T, before)


def test_ablations_take_their_parts_away():
    plain = {name for name, _ in GatedViewMoE(CONFIG).named_parameters()}

    def names(**changes):
        return {name for name, _ in GatedViewMoE(dataclasses.replace(CONFIG, **changes)).named_parameters()}

    assert plain - names(gate=False) == {n for n in plain if n.startswith("gate")}
    assert plain - names(rank_embed=False) == {n for n in plain if n.endswith("rank_KD")}
    assert plain - names(mean_pool=True) == {n for n in plain if ".attend." in n or ".weigh." in n}
    assert names(shared_expert=True) == {n for n in plain if n.startswith(("gate", "experts.0"))}
    pooled = GatedViewMoE(dataclasses.replace(CONFIG, mean_pool=True, rank_embed=False))
    x = profiles()
    torch.testing.assert_close(pooled(x).logit_T, pooled(x.flip(2)).logit_T)


def test_gradients_are_right():
    network = GatedViewMoE(NetworkConfig(("raw", "std"), ranks=3, dim=4, hidden=3)).double()
    x = torch.rand(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.autograd.gradcheck(lambda x: network(x).score_T, x)


def test_seed_fixes_the_weights_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    one, two, other = GatedViewMoE(CONFIG, seed=3), GatedViewMoE(CONFIG, seed=3), GatedViewMoE(CONFIG, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters()):
        assert torch.equal(a, b)
        drawn = a.numel() == 1 or bool((a != a.reshape(-1)[0]).any())  # norms start at constants
        assert torch.equal(a, c) != drawn


@pytest.mark.parametrize(
    "changes",
    [{"views": ()}, {"ranks": 0}, {"dim": 0}, {"hidden": -1}, {"temperature": 0.0}, {"temperature": float("nan")}],
)
def test_bad_configuration(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        NetworkConfig(**changes)


@pytest.mark.parametrize("shape", [(3, 3, 5), (3, 4, 13), (3, 4, 0), (4, 5)])
def test_bad_profiles(shape):
    with pytest.raises(ValueError, match="profile_TEK"):
        GatedViewMoE(CONFIG)(torch.zeros(shape))
