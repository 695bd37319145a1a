"""State that moves once per optimizer step, and parameters that name their axes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.layers import MoE
from moesaic.losses import BalanceLoss
from moesaic.routing import (
    Context,
    ParameterSpec,
    ReLURouter,
    Router,
    Routing,
    StepCounter,
    StepState,
    TopKRouter,
    end_step,
    parameter_specs,
)
from moesaic.routing.state import in_recompute
from tests.routing.helpers import MatrixBank, rows


class Thermometer(StepState):
    """Counts forwards, with a parameter in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("threshold", torch.tensor(1.0001))
        self.register_buffer("whole", torch.tensor(3))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.counting()
        return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats_never_reach_step_state(dtype: torch.dtype) -> None:
    model = nn.Sequential(Thermometer(), nn.Linear(2, 2))
    part = model[0]
    weight, threshold = part.inner.weight.detach().clone(), part.threshold.clone()
    part(torch.ones(1, 2)).sum().backward()
    model.to(dtype)
    assert model[1].weight.dtype == dtype
    assert part.inner.weight.dtype == torch.float32
    assert part.inner.weight.grad.dtype == torch.float32
    assert torch.equal(part.inner.weight, weight)
    assert torch.equal(part.threshold, threshold)
    assert part.whole.dtype == torch.int64
    model.double().to(dtype)
    assert part.inner.weight.dtype == torch.float64
    model.float()
    assert part.inner.weight.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_recognised(use_reentrant: bool) -> None:
    part = Thermometer()
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint(part, x, use_reentrant=use_reentrant).sum().backward()
    assert part.seen == 1
    assert not in_recompute()
    part.eval()
    part(x)
    assert part.seen == 1


def test_counter_sums_and_starts_again() -> None:
    counter = StepCounter(3)
    device = torch.device("cpu")
    assert counter.drain(device).tolist() == [0, 0, 0]
    first = torch.tensor([1, 2, 3])
    counter.add(first)
    counter.add(torch.tensor([1, 0, 0]))
    assert counter.drain(device).tolist() == [2, 2, 3]
    assert first.tolist() == [1, 2, 3]
    assert counter.drain(device).tolist() == [0, 0, 0]


def test_a_part_shared_by_layers_ends_its_step_once() -> None:
    router = TopKRouter(4, 4, 2, noise_std=0.1)
    end_step(nn.ModuleList([MoE(MatrixBank(4, 4), router), MoE(MatrixBank(4, 4), router)]))
    assert int(router.noise_step) == 1


def _train_step(layers: nn.Module, x: Tensor, recompute: bool) -> None:
    def block(layer: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
        out, routing = layer(y)
        return y + out, sum(routing.losses.values(), out.new_zeros(()))

    total = x.new_zeros(())
    for layer in layers:
        if isinstance(layer, MoE):
            x, loss = checkpoint(block, layer, x, use_reentrant=False) if recompute else block(layer, x)
            total = total + loss
        else:
            x = x + layer(x)
    (x.square().mean() + total).backward()


def _balanced_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        [
            nn.Linear(8, 8),
            MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2, bias=True, bias_rate=0.01), losses=[BalanceLoss(scope="global")]),
            MoE(MatrixBank(8, 4), TopKRouter(8, 4, 2)),
            MoE(MatrixBank(8, 4), ReLURouter(8, 4, 1.0)),
        ]
    )


@pytest.mark.case("C11")
def test_evaluation_recomputation_and_unbalanced_layers_leave_the_state_alone() -> None:
    def run(eval_batches: int, recompute: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        layers = _balanced_layers()
        for step in range(3):
            for micro in range(2):
                _train_step(layers, rows(20, seed=10 * step + micro), recompute)
                layers.eval()
                for batch in range(eval_batches):
                    with torch.no_grad():
                        _train_step_eval(layers, rows(30, seed=100 + batch))
                layers.train()
            end_step(layers)
        grads = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        return layers.state_dict(), grads

    clean, clean_grads = run(0, False)
    assert clean["1.router.selection_bias_E"].abs().max() > 0
    assert clean["3.router.controller.coefficient"] != 1e-8
    for eval_batches, recompute in ((10, False), (0, True), (5, True)):
        state, grads = run(eval_batches, recompute)
        for name, value in clean.items():
            assert torch.equal(state[name], value), name
        for name, value in clean_grads.items():
            torch.testing.assert_close(grads[name], value, rtol=1e-5, atol=1e-7)


def _train_step_eval(layers: nn.Module, x: Tensor) -> None:
    for layer in layers:
        x = x + (layer(x)[0] if isinstance(layer, MoE) else layer(x))


@pytest.mark.case("C11")
def test_state_moves_once_a_step_however_many_micro_batches() -> None:
    router = TopKRouter(8, 4, 1, bias=True, bias_rate=0.5)
    for micro in range(5):
        router(rows(10, seed=micro))
        assert router.selection_bias_E.abs().max() == 0
    router.end_step()
    moved = router.selection_bias_E.clone()
    assert 0 < moved.abs().max() <= 1.0
    router.end_step()  # nothing seen since
    assert torch.equal(router.selection_bias_E, moved)


def test_a_model_built_on_the_meta_device_starts_clean() -> None:
    with torch.device("meta"):
        routers = [TopKRouter(8, 4, 1, bias=True, noise_std=0.1), ReLURouter(8, 4, 1.0)]
    for router in routers:
        router.to_empty(device="cpu")
        router.reset_parameters()
        router(rows(6))
        router.end_step()
        for name, buffer in router.named_buffers():
            assert torch.isfinite(buffer.double()).all(), name
    assert int(routers[0].noise_step) == 1
    assert routers[1].controller.coefficient.item() == pytest.approx(1e-8, rel=0.21)


def test_counts_are_no_buffers_and_state_is() -> None:
    router = TopKRouter(8, 4, 1, bias=True, noise_std=0.1)
    router(rows(6))
    assert set(router.state_dict()) == {"weight_ED", "selection_bias_E", "noise_step"}
    router.end_step()
    other = TopKRouter(8, 4, 1, bias=True, noise_std=0.1)
    other.load_state_dict(router.state_dict())
    x = rows(50, seed=3)
    assert torch.equal(other(x).expert_ids_TK, router(x).expert_ids_TK)
    assert torch.equal(copy.deepcopy(router)(x).expert_ids_TK, router(x).expert_ids_TK)


def test_parameters_name_axes_and_role() -> None:
    model = nn.ModuleDict(
        {
            "router": TopKRouter(4, 3, 1),
            "norm": nn.LayerNorm(4),
            "dense": nn.Linear(4, 2),
            "tokens": nn.Embedding(5, 4),
        }
    )
    model["again"] = model["dense"]
    specs = {name: spec for name, _, spec in parameter_specs(model)}
    assert specs == {
        "router.weight_ED": ParameterSpec(("expert", "model"), "router"),
        "norm.weight": ParameterSpec(("model",), "norm"),
        "norm.bias": ParameterSpec(("model",), "norm"),
        "dense.weight": ParameterSpec(("out", "in"), "dense"),
        "dense.bias": ParameterSpec(("out",), "bias"),
        "tokens.weight": ParameterSpec(("vocab", "model"), "embedding"),
    }
    with pytest.raises(ValueError, match="role must be one of"):
        ParameterSpec(("out",), "weight")


class OwnRouter(Router):
    """What a reader writes: one linear layer, the best expert."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.gate = nn.Linear(dim, num_experts)

    def score(self, x_TD: Tensor, context: Context) -> Tensor:
        return self.gate(x_TD)

    def choose(self, logits_TE: Tensor, context: Context, allowed_TE: Tensor | None = None) -> Tensor:
        return logits_TE.argmax(1, keepdim=True)

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, context: Context) -> Tensor:
        return (ids_TK < self.num_experts).to(logits_TE.dtype)


def test_a_router_of_ones_own_meets_the_contract() -> None:
    router = OwnRouter(8, 4).bfloat16()
    routing = router(rows(5).bfloat16(), Context(token_mask_T=torch.tensor([True, True, False, True, True])))
    assert isinstance(routing, Routing)
    assert routing.logits_TE is not None
    assert routing.logits_TE.dtype == torch.float32
    assert routing.load_E.sum() == 4
    assert routing.expert_ids_TK[2].tolist() == [4]


def test_doors_of_every_router() -> None:
    router = OwnRouter(8, 4)
    router.layer_name = "model.layers.3"
    with pytest.raises(ValueError, match=r"OwnRouter of model.layers.3: x_TD must have shape \(T, 8\), got \(2, 7\)"):
        router(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="got 2 rows and a context for 3"):
        router(torch.zeros(2, 8), Context(token_mask_T=torch.ones(3, dtype=torch.bool)))
    x = rows(4)
    x[2, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer model.layers.3, row 2, router OwnRouter.*hold NaN"):
        router(x)
    for arguments in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            OwnRouter(*arguments)
