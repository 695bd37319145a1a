"""Top-k selection against its definition: bias, groups, noise, ties, doors; the cosine router on the same rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.layers import MoE
from moesaic.routing import Context, CosineRouter, Routing, TopKRouter, TopKSelection
from tests.routing.helpers import MatrixBank, padded, rows


def by_definition(router: TopKSelection, logits: list[float]) -> tuple[list[int], list[float]]:
    """The rule for one row, in plain Python and double precision."""
    if router.score_function == "softmax":
        top = max(logits)
        exps = [math.exp(value - top) for value in logits]
        scores = [value / sum(exps) for value in exps]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    bias = router.selection_bias_E.tolist() if router.has_bias else [0.0] * len(scores)
    choosing = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // router.num_groups
    strength = [sum(sorted(choosing[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(router.num_groups)]
    groups = sorted(range(router.num_groups), key=lambda g: -strength[g])[: router.top_groups]
    allowed = [e for e in range(len(scores)) if e // size in groups]
    ids = sorted(allowed, key=lambda e: -choosing[e])[: router.top_k]
    weights = [scores[e] for e in ids]
    if router.renormalize:
        weights = [value / sum(weights) for value in weights]
    return ids, [value * router.scale for value in weights]


@given(
    score=st.sampled_from(["softmax", "sigmoid"]),
    top_k=st.integers(1, 4),
    renormalize=st.booleans(),
    groups=st.sampled_from([(1, 1), (4, 2), (2, 1), (8, 4)]),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_choice_and_weights_follow_the_definition(
    score: str, top_k: int, renormalize: bool, groups: tuple[int, int], bias: bool, scale: float, seed: int
) -> None:
    if renormalize and top_k == 1:
        return
    router = TopKRouter(
        6,
        8,
        top_k,
        score=score,
        renormalize=renormalize,
        scale=scale,
        bias=bias,
        num_groups=groups[0],
        top_groups=groups[1],
    ).double()
    if bias:
        router.selection_bias_E.copy_(rows(1, 8, seed + 1)[0] * 0.3)
    routing = router(rows(7, 6, seed, torch.float64))
    assert routing.logits_TE is not None
    for row in range(7):
        ids, weights = by_definition(router, routing.logits_TE[row].tolist())
        assert routing.expert_ids_TK[row].tolist() == ids
        assert routing.weights_TK[row].tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("top_k", [1, 2])
def test_renormalisation_is_the_default_from_two_experts_on(top_k: int) -> None:
    router = TopKRouter(8, 4, top_k)
    assert router.renormalize == (top_k > 1)
    routing = router(rows(6))
    routing.weights_TK.square().sum().backward()
    assert router.weight_ED.grad is not None
    assert router.weight_ED.grad.abs().max() > 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_top_1_with_renormalised_weights_is_refused(score: str) -> None:
    with pytest.raises(ValueError, match=r"top_k=1.*router gets no gradient.*use renormalize=False, or top_k >= 2"):
        TopKRouter(8, 4, 1, renormalize=True, score=score)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 5}, "top_k must be between 1 and num_experts = 4, got 5"),
        ({"top_k": 0}, "top_k must be between 1"),
        ({"score": "relu"}, "score must be one of"),
        ({"scale": 0.0}, "scale must be finite and not 0"),
        ({"scale": math.nan}, "scale must be finite"),
        ({"bias_rate": -1.0}, "bias_rate must be finite and >= 0"),
        ({"noise_std": math.inf}, "noise_std must be finite"),
        ({"num_groups": 3}, "num_groups must divide num_experts = 4, got 3"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups must be between 1 and num_groups = 2"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 2}, "cannot come from top_groups = 1 groups of 1 experts"),
    ],
)
def test_doors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKRouter(8, 4, **{"top_k": 2, **arguments})  # type: ignore[arg-type]


@pytest.mark.case("C01")
def test_near_ties_are_decided_in_float32_whatever_the_model_is() -> None:
    router = TopKRouter(8, 4, 1)
    with torch.no_grad():
        router.weight_ED.zero_()
        router.weight_ED[0, 0] = 1.0
        router.weight_ED[1, 0] = 1.001  # equal in bf16
        router.weight_ED[2] = router.weight_ED[1] - 1e-3
    layer = MoE(MatrixBank(8, 4), router)
    x = rows(500).bfloat16()
    reference = router(x.float())
    for model in (layer, layer.bfloat16()):
        y, routing = model(x if model.experts.weight_EDD.dtype == torch.bfloat16 else x.float())
        assert torch.equal(routing.expert_ids_TK, reference.expert_ids_TK)
        assert torch.equal(routing.weights_TK, reference.weights_TK)
    assert y.dtype == torch.bfloat16
    assert layer.router is not None
    assert layer.router.weight_ED.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.router(x.float()).expert_ids_TK, reference.expert_ids_TK)


@pytest.mark.case("C02")
def test_ties_go_to_the_lower_index_on_every_pass() -> None:
    router = TopKRouter(8, 8, 3)
    nn.init.zeros_(router.weight_ED)
    layer = MoE(MatrixBank(8, 8), router)
    x = rows(257)
    threads = torch.get_num_threads()
    try:
        for count in (1, 8):
            torch.set_num_threads(count)
            for order in (torch.arange(257), torch.randperm(257, generator=torch.Generator().manual_seed(0))):
                ids = router(x[order]).expert_ids_TK
                assert torch.equal(ids, torch.tensor([0, 1, 2]).expand(257, 3))
    finally:
        torch.set_num_threads(threads)

    def gradients(recompute: bool) -> list[Tensor]:
        layer.zero_grad()

        def block(y: Tensor) -> Tensor:
            return layer(y)[0]

        out = checkpoint(block, x.requires_grad_(), use_reentrant=False) if recompute else block(x)
        out.square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]

    plain = gradients(False)
    for again in (gradients(True), gradients(True)):
        assert len(plain) == 2
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other)


def test_saturated_scores_still_choose_by_their_logits() -> None:
    router = TopKRouter(2, 4, 1, score="sigmoid", renormalize=False)
    with torch.no_grad():
        router.weight_ED.copy_(torch.tensor([[40.0, 0], [60.0, 0], [50.0, 0], [0, 0]]))  # all sigmoids round to 1
    assert router(torch.tensor([[1.0, 0.0]])).expert_ids_TK.tolist() == [[1]]


def test_bias_moves_against_load_with_mean_zero_and_chooses_without_weighing() -> None:
    router = TopKRouter(8, 4, 1, bias=True, bias_rate=0.1)
    with torch.no_grad():
        router.weight_ED.copy_(torch.eye(8)[:4] * 0.1)
    x = torch.eye(8)[[0, 0, 0, 1]]
    before = router(x)
    assert before.load_E.tolist() == [3, 1, 0, 0]  # mean 1: expert 0 above, 1 at it, 2 and 3 below
    router.end_step()
    moves = torch.tensor([-0.1, 0.0, 0.1, 0.1])
    torch.testing.assert_close(router.selection_bias_E, moves - moves.mean())
    assert router.selection_bias_E.mean().abs() < 1e-8
    after = router(x)
    assert after.load_E.tolist() == [0, 0, 4, 0]
    assert after.logits_TE is not None
    torch.testing.assert_close(after.weights_TK[:, 0], after.logits_TE.softmax(-1)[:, 2])
    router.end_step()
    router.eval()
    held = router.selection_bias_E.clone()
    router(x)
    router.end_step()
    assert torch.equal(router.selection_bias_E, held)


def test_bias_evens_out_the_load() -> None:
    torch.manual_seed(0)
    router = TopKRouter(8, 4, 1, bias=True, bias_rate=0.02)
    x = rows(400) + torch.tensor([2.0] + [0.0] * 7)
    start = router(x).load_E
    for _ in range(150):
        router(x)
        router.end_step()
    end = router(x).load_E
    assert start.max() > 200
    assert end.max() < 125
    assert end.min() > 75


def test_bias_rate_zero_holds_a_given_bias() -> None:
    router = TopKRouter(8, 4, 1, bias=True, bias_rate=0.0)
    router.selection_bias_E.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert router(rows(5)).expert_ids_TK.eq(3).all()
    router.end_step()
    assert router.selection_bias_E.tolist() == [0.0, 0.0, 0.0, 9.0]


@pytest.mark.parametrize("groups", [(1, 1), (2, 1)])
def test_allowed_restricts_the_choice_and_leaves_slots_empty(groups: tuple[int, int]) -> None:
    router = TopKRouter(8, 4, 2, num_groups=groups[0], top_groups=groups[1])
    x = rows(6)
    routing = router(x)
    assert routing.logits_TE is not None
    allowed = torch.tensor([[False, False, True, True]]).expand(6, 4)
    ids = router.choose(routing.logits_TE, Context(), allowed)
    assert ids.sort(1).values.tolist() == [[2, 3]] * 6
    only = torch.tensor([[False, True, False, False]]).expand(6, 4)
    ids = router.choose(routing.logits_TE, Context(), only)
    assert ids.tolist() == [[1, 4]] * 6
    changed = router.decide(routing.logits_TE, ids, Context())
    torch.testing.assert_close(changed.weights_TK, torch.tensor([[1.0, 0.0]]).expand(6, 2))
    none = router.choose(routing.logits_TE, Context(), torch.zeros(6, 4, dtype=torch.bool))
    assert router.decide(routing.logits_TE, none, Context()).load_E.sum() == 0


def test_weigh_is_the_models_rule_for_any_choice() -> None:
    router = TopKRouter(8, 4, 2, score="sigmoid", scale=2.5)
    logits = rows(3, 4)
    ids = torch.tensor([[3, 0, 1], [2, 4, 4], [4, 4, 4]])
    weights = router.weigh(logits, ids, Context())
    first = logits.sigmoid()[0, [3, 0, 1]]
    torch.testing.assert_close(weights[0], 2.5 * first / first.sum())
    torch.testing.assert_close(weights[1], torch.tensor([2.5, 0.0, 0.0]))
    assert weights[2].tolist() == [0.0, 0.0, 0.0]


def test_noise_touches_only_the_choice_in_training_and_repeats() -> None:
    router = TopKRouter(8, 8, 2, noise_std=2.0, seed=5)
    x = rows(200)
    clean = TopKRouter(8, 8, 2)
    clean.load_state_dict({"weight_ED": router.weight_ED})
    noisy = router(x)
    assert not torch.equal(noisy.expert_ids_TK, clean(x).expert_ids_TK)
    assert noisy.logits_TE is not None
    assert torch.equal(noisy.logits_TE, clean(x).logits_TE)
    assert torch.equal(noisy.weights_TK, clean.weigh(noisy.logits_TE, noisy.expert_ids_TK, Context()))
    state = torch.get_rng_state()
    assert torch.equal(router(x).expert_ids_TK, noisy.expert_ids_TK)
    assert torch.equal(torch.get_rng_state(), state)
    router.end_step()
    assert not torch.equal(router(x).expert_ids_TK, noisy.expert_ids_TK)
    router.noise_step.zero_()
    router.layer_index = 1
    assert not torch.equal(router(x).expert_ids_TK, noisy.expert_ids_TK)
    router.eval()
    assert torch.equal(router(x).expert_ids_TK, clean(x).expert_ids_TK)


def test_noise_is_drawn_again_in_recomputation() -> None:
    layer = MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2, noise_std=1.0))
    x = rows(30).requires_grad_()
    (plain,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    (again,) = torch.autograd.grad(checkpoint(lambda y: layer(y)[0], x, use_reentrant=False).square().sum(), x)
    assert torch.equal(plain, again)


@pytest.mark.case("C03")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [TopKRouter, CosineRouter])
def test_padding_gets_empty_slots_and_changes_nothing(side: str, kind: type[TopKSelection]) -> None:
    router = kind(8, 4, 2, bias=True)
    sequences = [rows(length, seed=length) for length in (3, 9, 30)]
    x, context = padded(sequences, side, 30, filler=torch.nan)
    routing = router(x, context)
    real = context.token_mask_T
    assert real is not None
    alone = [router(sequence) for sequence in sequences]
    torch.testing.assert_close(routing.weights_TK[real], torch.cat([one.weights_TK for one in alone]))
    assert torch.equal(routing.expert_ids_TK[real], torch.cat([one.expert_ids_TK for one in alone]))
    assert routing.expert_ids_TK[~real].eq(4).all()
    assert torch.equal(routing.load_E, sum(one.load_E for one in alone))
    routing.weights_TE.square().sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.case("C14")
@pytest.mark.parametrize("kind", [TopKRouter, CosineRouter])
def test_no_row_and_one_row(kind: type[TopKSelection]) -> None:
    router = kind(8, 4, 2, bias=True, num_groups=2, noise_std=0.1)
    for count in (0, 1):
        routing = router(rows(count))
        assert routing.expert_ids_TK.shape == (count, 2)
        assert routing.load_E.sum() == 2 * count
    router.end_step()
    assert torch.isfinite(router.selection_bias_E).all()


def test_gradient_of_the_weights() -> None:
    for options in ({"score": "softmax"}, {"score": "sigmoid"}, {"renormalize": False, "scale": 2.0}):
        router = TopKRouter(4, 5, 2, **options)  # type: ignore[arg-type]
        logits = rows(3, 5, dtype=torch.float64).requires_grad_()
        ids = router.choose(logits, Context())
        assert torch.autograd.gradcheck(lambda value, r=router, i=ids: r.weigh(value, i, Context()), (logits,))


def test_cosine_scores_are_cosines_over_the_temperature() -> None:
    router = CosineRouter(8, 4, 2, routing_dim=3, temperature=0.5)
    x = rows(5)
    logits = router(x).logits_TE
    assert logits is not None
    low = x @ router.projection_RD.T
    expected = nn.functional.cosine_similarity(low[:, None], router.weight_ER[None], dim=-1) / 0.5
    torch.testing.assert_close(logits, expected)
    scaled: Routing = router(x * 100)
    assert torch.equal(scaled.expert_ids_TK, router(x).expert_ids_TK)
    torch.testing.assert_close(scaled.logits_TE, logits)


def test_cosine_temperature_has_a_floor_and_keeps_learning_there() -> None:
    router = CosineRouter(8, 4, 2, temperature=0.011)
    with torch.no_grad():
        router.temperature_log.fill_(-20.0)
    assert router.temperature.item() == pytest.approx(0.01)
    routing = router(rows(50))
    assert routing.logits_TE is not None
    assert routing.logits_TE.abs().max() <= 100.001
    routing.logits_TE.square().sum().backward()
    for parameter in router.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    zero = router(torch.zeros(1, 8))
    assert zero.expert_ids_TK.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"routing_dim": 9}, "routing_dim must be between 1 and dim = 8, got 9"),
        ({"temperature": 0.01}, "temperature must be finite and above 0.01"),
        ({"top_k": 9}, "top_k must be between"),
    ],
)
def test_cosine_doors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CosineRouter(8, 4, **{"top_k": 2, **arguments})  # type: ignore[arg-type]
