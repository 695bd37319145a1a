"""Which parameter goes to which rule, and state that comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.routing import parameter_specs
from moesaic.training import MuonConfig, OptimizerConfig, build_optimizers
from moesaic.training.row_adam import RowAdam
from tests.training import standin


def groups(model: nn.Module, config: OptimizerConfig) -> dict[str, tuple[str, dict]]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (part, group)
        for part, optimizer in build_optimizers(model, config).parts.items()
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_routers_norms_and_biases_do_not_decay():
    model = standin.model(layers=("moe", "dense"))
    found = groups(model, OptimizerConfig(weight_decay=0.1, role_lr={"router": 0.5}))
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, _, spec in parameter_specs(model):
        part, group = found[name]
        assert part == "adamw"
        exempt = spec.role in ("router", "norm", "bias", "expert-bias", "scalar")
        assert group["weight_decay"] == (0.0 if exempt else 0.1), name
        assert group["lr"] == (0.5 if spec.role == "router" else 1e-3), name


@pytest.mark.parametrize(("experts", "stack"), [("each", {None}), ("stack", {1, 2}), ("adamw", set())])
def test_muon_takes_matrices_by_role(experts, stack):
    model = standin.model(layers=("moe", "dense"))
    config = OptimizerConfig(name="muon", muon=MuonConfig(lr=0.03, expert_lr=0.04, experts=experts))
    found = groups(model, config)
    for name, _, spec in parameter_specs(model):
        part, group = found[name]
        expert = spec.role in ("expert-in", "expert-out")
        matrix = spec.role == "dense" or (expert and experts != "adamw")
        assert part == ("muon" if matrix else "adamw"), name
        if matrix:
            assert group["lr"] == (0.04 if expert else 0.03)
            assert not group["transposed"]
    assert {found[n][1]["stack"] for n, p, s in parameter_specs(model) if s.role.startswith("expert-")
            and found[n][0] == "muon"} == stack  # fmt: skip


def test_the_output_matrix_is_no_dense_matrix():
    class WithHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)

        def get_output_embeddings(self):
            return self.head

    found = groups(WithHead(), OptimizerConfig(name="muon", role_lr={"head": 0.7}))
    assert found["body.weight"][0] == "muon"
    assert found["head.weight"][0] == "adamw"
    assert found["head.weight"][1]["lr"] == 0.7


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused():
    model = standin.model()
    model.embedding.weight.requires_grad_(False)
    assert "embedding.weight" not in groups(model, OptimizerConfig())
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizers(model.requires_grad_(False), OptimizerConfig())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_as_tensors_comes_back(name):
    config = OptimizerConfig(name=name, muon=MuonConfig(every=2))
    runs = []
    for resumed in (False, True):
        model = standin.model()
        optimizers = build_optimizers(model, config)
        for step in range(5):
            if resumed and step == 3:
                state = {key: value.clone() for key, value in optimizers.state_tensors().items()}
                optimizers = build_optimizers(model, config)
                optimizers.load_state_tensors(state)
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizers.step()
        runs.append(standin.weights(model))
    assert standin.same(*runs)


def test_state_of_another_model_is_refused():
    optimizers = build_optimizers(standin.model(), OptimizerConfig())
    with pytest.raises(ValueError, match="optimizer 'muon'"):
        optimizers.load_state_tensors({"muon/head.weight/momentum": torch.zeros(27, 16)})
    with pytest.raises(ValueError, match="no parameter of this model"):
        optimizers.load_state_tensors({"adamw/nowhere/exp_avg": torch.zeros(1)})
    with pytest.raises(ValueError, match="is needed"):
        optimizers.load_state_tensors({"adamw/head.weight/exp_avg": torch.zeros(3, 3)})


def test_clipping_counts_every_gradient_once():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    optimizers = build_optimizers(model, OptimizerConfig())
    ids = torch.tensor([1, 1, 2, 7])
    model(ids).square().sum().backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
    norm = torch.cat([g.flatten() for g in dense]).norm()
    assert optimizers.clip(norm.item() / 2).item() == pytest.approx(norm.item(), rel=1e-5)
    assert optimizers.gradient_norm().item() == pytest.approx(norm.item() / 2, rel=1e-4)


def test_sparse_tables_go_to_the_row_rule_and_untouched_rows_stay():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    optimizers = build_optimizers(model, OptimizerConfig(role_lr={"embedding": 0.1}))
    assert isinstance(optimizers.parts["rows"], RowAdam)
    before = model[0].weight.detach().clone()
    model(torch.tensor([1, 1, 2])).square().sum().backward()
    optimizers.step()
    moved = (model[0].weight != before).any(1)
    assert moved.tolist() == [row in (1, 2) for row in range(10)]


def test_row_rule_by_hand_and_dense_equal_to_sparse():
    grads = [torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, -1.0], [0.0, 0.0]])]
    dense, sparse = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizers = [RowAdam([dense], lr=0.1, betas=(0.8, 0.9)), RowAdam([sparse], lr=0.1, betas=(0.8, 0.9))]
    for grad in grads:
        dense.grad = grad
        sparse.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), grad[:1], (2, 2), check_invariants=True)
        for optimizer in optimizers:
            optimizer.step()
    mean = 0.2 * grads[0][0]
    square = 0.1 * grads[0][0].square().mean()
    hand = -0.1 * mean / square.sqrt()
    mean, square = 0.8 * mean + 0.2 * grads[1][0], 0.9 * square + 0.1 * grads[1][0].square().mean()
    hand = hand - 0.1 * mean / square.sqrt()
    assert torch.allclose(sparse[0], hand, atol=1e-6)
    assert torch.allclose(sparse, dense, atol=1e-6)
    with pytest.raises(ValueError, match="moves tables"):
        RowAdam([nn.Parameter(torch.zeros(3))])
