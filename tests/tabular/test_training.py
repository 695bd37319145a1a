"""Training: the chunked step is the full-batch step, one seed is one network, files come back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moesaic.tabular import (
    GatedViewMoE,
    MultiViewDistanceEncoder,
    PseudoAnomalySampler,
    load_network,
    pretrain,
    save_network,
)
from moesaic.tabular.training import AnomalyScores, source_task
from moesaic.training import Step
from moesaic.training.config import StageConfig
from moesaic.training.task import step_loss

from .conftest import SMALL, blobs


def _task(seed=0, joint=False):
    rng = np.random.default_rng(seed)
    return source_task(blobs(rng, 45), SMALL, PseudoAnomalySampler(), rng, joint=joint)


def accumulate_loss(network, table, **options):
    """The gradient of one step, as the trainer adds it up."""
    task = AnomalyScores([table], [0], **options)
    batches = task.batches(Step(0, 0, 0, 1, StageConfig(1.0, 1, 1)))
    count, total = sum(map(task.count, batches)), 0.0
    for batch in batches:
        loss = step_loss(task.loss(network, batch), task.count(batch), count)
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_chunks_are_exactly_the_full_batch_step(chunk_rows, weight):
    whole, pieces = GatedViewMoE(SMALL).double(), GatedViewMoE(SMALL).double()
    task = _task()
    task = type(task)(task.profile_TEK.double(), task.label_T.double())
    one = accumulate_loss(whole, task, chunk_rows=10_000, gate_entropy_weight=weight)
    other = accumulate_loss(pieces, task, chunk_rows=chunk_rows, gate_entropy_weight=weight)
    assert one == pytest.approx(other, rel=1e-12)
    for a, b in zip(whole.parameters(), pieces.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_loss_is_mse_on_scores_minus_entropy():
    network, task = GatedViewMoE(SMALL), _task()
    out = network(task.profile_TEK)
    mse = float((out.score_T.detach() - task.label_T).square().mean())
    assert accumulate_loss(network, task) == pytest.approx(mse, rel=1e-5)
    entropic = accumulate_loss(network, task, gate_entropy_weight=2.0)
    assert entropic == pytest.approx(mse - 2.0 * float(out.routing.entropy.detach()), rel=1e-5)


def test_gate_entropy_weight_flattens_the_gate(rng):
    tables = [blobs(rng, 60)]
    plain, flat = (
        pretrain(tables, config=SMALL, epochs=30, lr=2e-2, seed=0, gate_entropy_weight=weight) for weight in (0.0, 1.0)
    )
    task = _task()
    assert flat(task.profile_TEK).routing.entropy > plain(task.profile_TEK).routing.entropy


def test_a_task_has_as_many_anomalies_as_rows_and_labels_them():
    task = _task()
    assert task.profile_TEK.shape == (90, 4, 20)
    assert task.label_T.tolist() == [0.0] * 45 + [1.0] * 45
    assert task.profile_TEK[45:].mean() > task.profile_TEK[:45].mean() + 0.05


def test_joint_pseudo_anomalies_are_one_point_in_all_views():
    task, rng = _task(joint=True), np.random.default_rng(0)
    rows = blobs(rng, 45)
    points = PseudoAnomalySampler().sample(rows, 45, rng)
    np.testing.assert_allclose(task.profile_TEK[45:], MultiViewDistanceEncoder(k=20).fit(rows).transform(points))


def test_seed_decides(rng):
    tables = [blobs(rng, 40), blobs(rng, 30, 5)]
    before = torch.get_rng_state()
    one, two, other = (pretrain(tables, config=SMALL, epochs=2, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    x = _task().profile_TEK
    assert torch.equal(one(x).score_T, two(x).score_T)
    assert not torch.equal(one(x).score_T, other(x).score_T)


def test_training_separates(network):
    rng = np.random.default_rng(99)
    out = network(source_task(blobs(rng, 100, 4), SMALL, PseudoAnomalySampler(), rng).profile_TEK)
    assert out.score_T[100:].mean() > out.score_T[:100].mean() + 0.2


def test_files_come_back(network, tmp_path):
    path = tmp_path / "network.safetensors"
    save_network(network, path, {"sources": "two blobs"})
    again = load_network(path)
    assert again.config == network.config
    x = _task().profile_TEK
    assert torch.equal(again(x).score_T, network(x).score_T)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_foreign_files_are_refused(network, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not a tensor file at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_network(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="format"):
        load_network(path)
    config = json.dumps(network.config.to_dict())
    save_file({"a": torch.ones(2)}, path, {"format": "moesaic.tabular.GatedViewMoE/1", "config": config})
    with pytest.raises(ValueError, match="Missing key"):
        load_network(path)
    with pytest.raises(FileNotFoundError):
        load_network(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pretrain([]), "contexts is empty"),
        (lambda: pretrain([np.eye(3)], epochs=0), "epochs must be at least 1, got 0"),
        (lambda: pretrain([np.eye(3)], config=SMALL, chunk_rows=0), "chunk_rows must be at least 1, got 0"),
        (lambda: pretrain([np.eye(3)], config=SMALL, gate_entropy_weight=-1), "gate_entropy_weight"),
        (lambda: pretrain([[[1.0]]], config=SMALL), "at least 2"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
