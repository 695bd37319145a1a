"""Routers and losses on two ranks with different numbers of rows: they agree, and nothing hangs."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moesaic.layers import MoE
from moesaic.losses import BalanceLoss, balance_loss
from moesaic.routing import Context, ExpertChoiceRouter, ReLURouter, TopKRouter, end_step
from tests.routing.helpers import MatrixBank, rows

SPLIT = 13  # rows of rank 0; rank 1 has the other 27
ALL = 40


def layer_with(router: str) -> MoE:
    torch.manual_seed(0)
    made = {
        "bias": lambda: TopKRouter(8, 4, 2, bias=True, bias_rate=0.1),
        "relu": lambda: ReLURouter(8, 4, 1.0),
        "choice": lambda: ExpertChoiceRouter(8, 4, 0.25, grouping="batch"),
    }[router]()
    return MoE(MatrixBank(8, 4), made, losses=[BalanceLoss(1.0, scope="global")])


def train(layer: MoE, batches: list[Tensor]) -> tuple[Tensor, float]:
    """One step over ``batches``; the router's gradient and the last value of the balance loss."""
    for x in batches:
        y, routing = layer(x)
        (y.square().sum() + routing.losses["balance_global"]).backward()
    end_step(layer)
    assert layer.router is not None
    return layer.router.weight_ED.grad, float(routing.losses["balance_global"].detach())  # type: ignore[return-value]


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    x = rows(ALL)
    mine = x[:SPLIT] if rank == 0 else x[SPLIT:]
    out: dict[str, Any] = {}
    for name in ("bias", "relu", "choice"):
        layer = layer_with(name)
        gradient, value = train(layer, [mine])
        out[name] = {"state": layer.router.state_dict(), "gradient": gradient, "value": value}  # type: ignore[union-attr]
        unrouted = layer(mine)[1].extras.get("unrouted_rows")
        out[name]["unrouted"] = None if unrouted is None else int(unrouted)
    layer = layer_with("bias")
    out["repeated"] = {"gradient": train(layer, [x])[0]}
    layer = layer_with("bias")
    train(layer, [rows(0) if rank == 0 else x])  # a rank without rows takes part
    out["empty"] = {"state": layer.router.state_dict()}  # type: ignore[union-attr]
    layer = layer_with("bias").eval()
    for _ in range(rank * 3):  # evaluation exchanges nothing: ranks may evaluate different numbers of batches
        layer(x)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        mp.spawn(on_rank, args=(str(folder),), nprocs=2)
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(("name", "key"), [("bias", "selection_bias_E"), ("relu", "controller.coefficient")])
def test_controllers_agree_and_equal_one_process(ranks: list[dict[str, Any]], name: str, key: str) -> None:
    layer = layer_with(name)
    train(layer, [rows(ALL)])
    assert layer.router is not None
    expected = layer.router.state_dict()[key]
    assert not torch.equal(expected, layer_with(name).router.state_dict()[key])  # type: ignore[union-attr]
    for rank in ranks:
        assert torch.equal(rank[name]["state"][key], expected)


@pytest.mark.case("C05")
def test_a_rank_without_rows_takes_part(ranks: list[dict[str, Any]]) -> None:
    layer = layer_with("bias")
    train(layer, [rows(ALL)])
    assert layer.router is not None
    for rank in ranks:
        assert torch.equal(rank["empty"]["state"]["selection_bias_E"], layer.router.state_dict()["selection_bias_E"])


@pytest.mark.case("C05")
def test_each_rank_counts_its_own_unrouted_rows(ranks: list[dict[str, Any]]) -> None:
    for rank, x in zip(ranks, (rows(ALL)[:SPLIT], rows(ALL)[SPLIT:]), strict=True):
        _, routing = layer_with("choice")(x)
        assert rank["choice"]["unrouted"] == int(routing.extras["unrouted_rows"]) > 0


@pytest.mark.case("C10")
def test_the_same_batch_on_every_rank_gives_the_gradient_of_one(ranks: list[dict[str, Any]]) -> None:
    gradient, _ = train(layer_with("bias"), [rows(ALL)])
    for rank in ranks:
        torch.testing.assert_close(rank["repeated"]["gradient"], gradient)


@pytest.mark.case("C10")
def test_unequal_ranks_use_the_loads_of_all(ranks: list[dict[str, Any]]) -> None:
    load_E = layer_with("bias")(rows(ALL))[1].load_E
    for rank, x in zip(ranks, (rows(ALL)[:SPLIT], rows(ALL)[SPLIT:]), strict=True):
        routing = layer_with("bias").route(x, Context())
        assert rank["bias"]["value"] == pytest.approx(balance_loss(routing, load_E=load_E).item(), rel=1e-5)
        assert rank["bias"]["value"] != pytest.approx(balance_loss(routing).item(), rel=1e-5)
