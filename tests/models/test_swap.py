"""Other routers on a trained model's logits: chosen and weighed as said, padding, restored bit for bit, no leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.models import record_routing, swap_routing
from moesaic.routing import ExpertChoiceRouter, PairChoiceRouter, TopKRouter, end_step, unified_score
from tests.models.families import EXPERTS, TOP_K, build, run, token_ids
from tests.models.small import small_model, tokens

NAMES = ["qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "deepseek_v3"]
AHEAD: dict[str, Any] = {"allow_future": True}


@torch.no_grad()
@pytest.mark.spec("usmoe", "6.10")
@pytest.mark.parametrize("name", [*NAMES, "ours"])
def test_swapped_and_restored_bit_for_bit(name: str) -> None:
    model = small_model(num_hidden_layers=2) if name == "ours" else build(name)
    ids = tokens(2, 9) if name == "ours" else token_ids()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = model(ids).logits
    with swap_routing(model, PairChoiceRouter, experts_per_token=1.5, **AHEAD):
        during = model(ids).logits
    assert not torch.equal(during, before)
    assert torch.isfinite(during).all()
    assert torch.equal(model(ids).logits, before)
    after = model.state_dict()
    assert state.keys() == after.keys() and all(torch.equal(state[key], after[key]) for key in state)
    with pytest.raises(RuntimeError, match="inside"), swap_routing(model, PairChoiceRouter, **AHEAD):
        raise RuntimeError("inside")
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", ["router", "model"])
def test_choice_and_weights_on_the_trained_gates_logits(name: str, weights: str) -> None:
    model, mask = build(name), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    options = {"experts_per_token": 1.5, **AHEAD}
    with record_routing(model) as record, swap_routing(model, PairChoiceRouter, weights=weights, **options):
        run(model, attention_mask=mask)
    for call in record.calls:
        routing = call.routing
        scores = unified_score(routing.logits_TE.float())
        for rows, budget in ((slice(0, 9), 7), (slice(9, 18), 13)):
            real = routing.real_T[rows]
            assert int(routing.mask_TE[rows].sum()) == budget
            kept, left = routing.mask_TE[rows] & real[:, None], ~routing.mask_TE[rows] & real[:, None]
            assert scores[rows][kept].min() >= scores[rows][left].max()
        if weights == "router":
            torch.testing.assert_close(routing.weights_TE, scores * routing.mask_TE, atol=1e-6, rtol=1e-5)
        else:
            expected = call.layer.rule.weigh(routing.logits_TE, routing.expert_ids_TK)
            torch.testing.assert_close(routing.weights_TK, expected)


@torch.no_grad()
def test_the_models_own_choice_by_another_class_changes_nothing() -> None:
    model = build("qwen3_moe_raw")
    before = run(model)
    with swap_routing(model, TopKRouter, top_k=TOP_K, renormalize=False):
        torch.testing.assert_close(run(model), before, atol=1e-5, rtol=1e-4)
    with swap_routing(model, TopKRouter, top_k=TOP_K, weights="model"):
        torch.testing.assert_close(run(model), before, atol=1e-5, rtol=1e-4)
    with record_routing(model) as record, swap_routing(model, ExpertChoiceRouter, experts_per_token=2.0, **AHEAD):
        run(model)
    assert all(call.routing.load_E.tolist() == [6] * EXPERTS for call in record.calls)  # ceil(2 * 9 / 8) of each text


@torch.no_grad()
@pytest.mark.case("C04")
@pytest.mark.spec("usmoe", "6.9")
@pytest.mark.parametrize("grouping", ["sequence", "position", "token", "causal"])
def test_a_future_token_changes_an_earlier_ones_experts_only_with_sequence_budgets(grouping: str) -> None:
    model = build("qwen3_moe")
    leaked = False
    for seed in range(4):
        ids = token_ids(2, 12, seed)
        other = ids.clone()
        other[:, -1] = (ids[:, -1] + 7) % 60 + 3
        options = {"grouping": grouping, "experts_per_token": 1.5, **AHEAD}
        # Opened first, the recorder sees what the swap decided.
        with record_routing(model) as record, swap_routing(model, PairChoiceRouter, **options):
            logits = run(model, ids), run(model, other)
        half = len(record.calls) // 2
        for one, two in zip(record.calls[:half], record.calls[half:], strict=True):
            same = [c.routing.mask_TE.view(2, 12, -1)[:, :-1] for c in (one, two)]
            leaked |= not torch.equal(*same)
        if grouping != "sequence":
            torch.testing.assert_close(logits[0][:, :-1], logits[1][:, :-1])
    assert leaked == (grouping == "sequence")


@torch.no_grad()
@pytest.mark.case("C04")
def test_generation_with_a_calibrated_threshold_is_the_full_forward() -> None:
    model = build("qwen3_moe")
    with swap_routing(model, PairChoiceRouter, grouping="causal", experts_per_token=1.5) as routers:
        routers.train()
        run(model, token_ids(8, 24))
        end_step(routers)
        routers.eval()
        ids = token_ids(2, 6, seed=5)
        out = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        logits = run(model, out)
        assert torch.equal(logits[:, 5:-1].argmax(-1), out[:, 6:])
        assert len(routers) == 3 and all(int(router.threshold_steps) == 1 for router in routers)


def test_gradient_reaches_the_trained_gate() -> None:
    model = build("olmoe").train()
    with swap_routing(model, PairChoiceRouter, grouping="position") as routers:
        run(model).square().mean().backward()
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in routers.parameters())


def test_doors() -> None:
    model = build("olmoe")
    with pytest.raises(ValueError, match="weights must be one of"), swap_routing(model, TopKRouter, weights="none"):
        pass
    with pytest.raises(ValueError, match="allow_future=True"), swap_routing(model, PairChoiceRouter):
        pass
    with pytest.raises(ValueError, match="layers names 7"), swap_routing(model, PairChoiceRouter, layers=[7], **AHEAD):
        pass
    with pytest.raises(ValueError, match="top_k must be between"), swap_routing(model, TopKRouter, top_k=9):
        pass
    block = model.model.layers[0].mlp
    with swap_routing(model, PairChoiceRouter, **AHEAD), pytest.raises(ValueError, match="needs group_T"):
        block(torch.zeros(1, 3, 32))  # called alone, without the model around it: which sequence is not known
