"""Recorders: phases, padding, gradients, statistics with flat memory, and noticing that nothing was recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.models.record import record_routing
from tests.models.families import EXPERTS, build, run, token_ids


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("qwen3_moe")


@torch.no_grad()
def test_prefill_and_decode_with_left_padding(model: nn.Module) -> None:
    ids = token_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with record_routing(model, layers=[1]) as record:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    phases = [(call.context.phase, call.routing.num_rows) for call in record.calls]
    assert phases == [("prefill", 12), ("decode", 2), ("decode", 2)]
    first, second, _ = record.calls
    assert first.context.token_mask_T.view(2, 6).tolist()[0] == [False, False, True, True, True, True]
    assert first.context.position_T.view(2, 6)[0, 2:].tolist() == [0, 1, 2, 3]
    assert second.context.position_T.tolist() == [4, 6]
    assert first.routing.load_E.sum() == (12 - 2) * 3
    assert bool(second.context.token_mask_T.all())


@torch.no_grad()
@pytest.mark.case("C03")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_nowhere(model: nn.Module, side: str) -> None:
    ids = token_ids(1, 5)
    alone, padded = [], torch.zeros(1, 9, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    where = slice(4, 9) if side == "left" else slice(0, 5)
    padded[:, where], mask[:, where] = ids, 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with record_routing(model) as record:
        run(model, ids)
    alone = [call.routing for call in record.calls]
    with record_routing(model) as record:
        run(model, padded, attention_mask=mask, position_ids=position)
    for one, call in zip(alone, record.calls, strict=True):
        assert torch.equal(one.load_E, call.routing.load_E)
        assert torch.allclose(one.importance_E, call.routing.importance_E, atol=1e-5)
        assert torch.equal(call.context.position_T, position.reshape(-1))


@torch.no_grad()
def test_mask_given_by_place_and_inner_model_called_alone(model: nn.Module) -> None:
    ids, mask = token_ids(2, 6), torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    with record_routing(model) as record:
        model(ids, mask)
        model.model(input_ids=ids, attention_mask=mask)
    assert len(record.calls) == 6
    assert all(torch.equal(call.context.token_mask_T, mask.reshape(-1)) for call in record.calls)


def test_a_mask_of_four_axes_says_nothing_about_padding(model: nn.Module) -> None:
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    with torch.no_grad(), record_routing(model) as record:
        run(model, attention_mask=mask)
    assert all(call.context.token_mask_T is None for call in record.calls)


def test_gradient_flows_through_what_is_recorded(model: nn.Module) -> None:
    model.zero_grad()
    with record_routing(model, hidden=True, outputs=True) as record:
        run(model)
    call = record.by_layer(1)[0]
    for value in (call.routing.weights_TK.square(), call.routing.logits_TE.square(), call.x.square(), call.y.square()):
        (grad,) = torch.autograd.grad(value.sum(), model.model.layers[0].mlp.experts.down_proj, retain_graph=True)
        assert grad.abs().sum() > 0
    with torch.no_grad(), record_routing(model) as record:
        run(model)
    assert not record.calls[0].routing.weights_TK.requires_grad
    assert record.calls[0].x is None
    assert record.calls[0].y is None


@torch.no_grad()
def test_reduce_keeps_only_the_statistic(model: nn.Module) -> None:
    with record_routing(model, reduce=lambda call: (call.routing.load_E, call.y.norm(dim=1).mean())) as record:
        for seed in range(3):
            run(model, token_ids(seed=seed))
    assert len(record) == 9
    loads = torch.stack([load for load, _ in record.by_layer(1)])
    assert loads.shape == (3, EXPERTS)
    assert loads.sum().item() == 3 * 18 * 3
    with pytest.raises(ValueError, match="index 7"):
        record.by_layer(7)


def test_a_recorder_notices_that_it_recorded_nothing(model: nn.Module) -> None:
    """Hooks do not fire in replayed graphs or fused kernels: silence would look like an empty trace."""
    with pytest.warns(RuntimeWarning, match="recorded nothing"), record_routing(model) as record:
        assert record.calls == []
    with pytest.raises(RuntimeError, match="recorded nothing"):
        _ = record.calls
    with pytest.raises(RuntimeError, match="recorded nothing"):
        record.by_layer(0)


@torch.no_grad()
def test_a_router_with_nan_is_named(model: nn.Module) -> None:
    broken = build("mixtral")
    broken.model.layers[1].mlp.gate.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp.*not finite"), record_routing(broken):
        run(broken)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.case("C14")
def test_one_token_and_none(name: str) -> None:
    model = build(name)
    with record_routing(model) as record:
        run(model, token_ids(1, 1))
    assert all(call.routing.num_rows == 1 for call in record.calls)
