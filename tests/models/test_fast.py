"""Fast experts inside foreign models: equal logits and gradients, undone, beside overrides, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from moesaic.experts import backend
from moesaic.models import fast_forward
from moesaic.models.fast import use_fast_experts
from moesaic.models.handle import moe_layers
from moesaic.models.override import override_routing
from moesaic.models.record import record_routing
from moesaic.routing import Routing
from tests.models.families import FAMILIES, build, run
from tests.models.small import small_model

# Their eager experts compute in float32, or weigh by float32 weights (longcat_flash of 5.24), whatever the dtype.
FLOAT32_INSIDE = ("beam", "openai_privacy_filter", "longcat_flash")


CALLED = ("stacked", "block selects")  # forms whose experts are called with (x, ids, weights)


@pytest.fixture(scope="module", params=[name for name, spec in FAMILIES.items() if spec.form in CALLED])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, nn.Module]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param, build(request.param)
    torch.set_num_threads(threads)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a whole model, in float64: in float32 a parameter whose gradient cancels is mostly rounding."""
    run(model).square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_a_model_without_readable_experts_says_why() -> None:
    model = build("qwen3_moe")
    for layer in moe_layers(model):
        bank = layer.experts.module
        bank.down_proj = nn.Parameter(bank.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"no MoE layer .* can run by our backends: .*layers.*quantized"):
        use_fast_experts(model)


@pytest.mark.parametrize("name", [name for name, spec in FAMILIES.items() if spec.form not in CALLED])
def test_forms_of_their_own_run_as_before(name: str) -> None:
    with pytest.raises(ValueError, match="stored or called in a form of their own"):
        use_fast_experts(build(name))


def test_logits_and_gradients_equal_eager(family: tuple[str, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    name, model = family
    ran: list[int] = []
    plain = run(model).detach()
    double = copy.deepcopy(model).double()
    before = gradients(double)
    fused = fast_forward.fused_ffn
    summed = fast_forward.plain_sum
    monkeypatch.setattr(fast_forward, "fused_ffn", lambda *a, **k: ran.append(1) or fused(*a, **k))
    monkeypatch.setattr(fast_forward, "plain_sum", lambda *a, **k: ran.append(1) or summed(*a, **k))
    with use_fast_experts(model) as fast:
        assert list(fast.covered) == [layer.name for layer in moe_layers(model)]
        assert not fast.refused
        ran.clear()
        assert torch.allclose(run(model).detach(), plain, atol=1e-5, rtol=1e-5)
        assert len(ran) >= len(moe_layers(model))
    with use_fast_experts(double):
        after = gradients(double)
    assert before.keys() == after.keys()
    bound = 1e-5 if name in FLOAT32_INSIDE else 1e-9
    for key, value in before.items():
        assert torch.allclose(after[key], value, atol=bound * float(value.abs().max()) + 1e-12, rtol=bound), key
    ran.clear()
    assert torch.equal(run(model).detach(), plain)
    assert not ran
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_overrides_and_records_see_the_same(family: tuple[str, nn.Module]) -> None:
    """Forced routing with empty slots gives what it gives without, and what is recorded is what was forced."""
    _, model = family
    layer = moe_layers(model)[0]
    choices = layer.router.num_experts
    ids = torch.arange(18)[:, None].add(torch.arange(2)[None]) % choices
    ids[::3, 1] = choices
    weights = torch.linspace(0.3, 0.9, 36).view(18, 2).masked_fill(ids == choices, 0.0)
    forced = Routing(ids, weights, choices)
    with override_routing(model, lambda call: forced):
        want = run(model)
    with use_fast_experts(model), record_routing(model) as record, override_routing(model, lambda call: forced):
        got = run(model)
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(call.routing.expert_ids_TK, ids) for call in record.calls)


def test_the_report_says_what_was_covered() -> None:
    text = str(use_fast_experts(build("qwen2_moe")))
    assert text.startswith("fast experts in 2 of 2 MoE layers")
    assert "through transformers' experts interface" in text
    assert "model.layers.1.mlp" in text


def test_layers_of_ours_are_fast_already() -> None:
    fast = use_fast_experts(small_model())
    assert set(fast.covered.values()) == {"of ours, fast already"}


def test_inside_the_reference_backend_it_can_be_differentiated_twice() -> None:
    model = build("qwen3_moe")
    use_fast_experts(model)
    bank = moe_layers(model)[0].experts.module
    rows = (torch.randn(4, 32), torch.tensor([[0, 5]] * 4), torch.full((4, 2), 0.5))
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(bank(*rows).square().mean(), bank.down_proj, create_graph=True)
    with backend("reference"):
        (first,) = torch.autograd.grad(bank(*rows).square().mean(), bank.down_proj, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), bank.down_proj)
    assert second.abs().sum() > 0


def test_somebody_elses_setting_survives_the_undoing() -> None:
    model = build("qwen3_moe")
    fast = use_fast_experts(model)
    again = use_fast_experts(model)
    assert not again._configs  # switched already: nothing to give back
    model.set_experts_implementation("grouped_mm")
    fast.undo()
    assert model.config._experts_implementation == "grouped_mm"


@torch.no_grad()
def test_a_copy_of_a_fast_model_is_independent() -> None:
    """A replaced forward belongs to its module: copied with it, it computes with the copy's weights."""
    model = build("step3p7")
    plain = run(model)
    with use_fast_experts(model):
        twin = copy.deepcopy(model)
        for layer in moe_layers(twin):
            layer.experts.module.down_proj.zero_()
        assert torch.allclose(run(model), plain, atol=1e-5)
        assert not torch.allclose(run(twin), plain, atol=1e-2)


@torch.no_grad()
def test_quantized_experts_are_left_alone() -> None:
    model = build("qwen3_moe")
    for layer in moe_layers(model)[:2]:
        bank = layer.experts.module
        bank.down_proj = nn.Parameter(bank.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    fast = use_fast_experts(model)
    assert set(fast.refused) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert "quantized (down_proj is torch.float8_e4m3fn)" in str(fast)


@torch.no_grad()
def test_a_forward_that_computes_something_else_is_not_replaced() -> None:
    model = build("step3p7")
    layer = moe_layers(model)[-1]
    kind = type(layer.experts.module)

    class Scaled(kind):
        def forward(self, x, ids, weights):
            return 2.0 * super().forward(x, ids, weights)

    layer.experts.module.__class__ = Scaled
    fast = use_fast_experts(model)
    assert "computes something else" in fast.refused[layer.name]
    assert len(fast.covered) == len(moe_layers(model)) - 1


@torch.no_grad()
def test_low_precision_sums_in_float32() -> None:
    """A bfloat16 model stays within rounding of the float32 one, closer than its own eager loop or as close."""
    exact = run(build("qwen3_moe"))
    model = build("qwen3_moe").bfloat16()
    eager = (run(model).float() - exact).abs().mean()
    with use_fast_experts(model):
        fast = (run(model).float() - exact).abs().mean()
    assert fast <= 1.1 * eager
