"""Held-out loss: every token once, whatever the batch, and never the auxiliary loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.training import evaluate_tokens
from moesaic.training.causal_lm import _windows
from tests.training import standin


@given(st.integers(2, 120), st.integers(1, 20), st.data())
def test_every_target_is_scored_once_in_order(count, length, data):
    stride = data.draw(st.integers(1, length))
    size = data.draw(st.integers(1, 5))
    tokens = torch.arange(count)
    scored = []
    for batch in _windows(tokens, length, stride, size):
        assert batch.inputs_BS.shape[1] <= length
        real = batch.targets_BS != -100
        assert torch.equal(batch.targets_BS[real], batch.inputs_BS[real] + 1)
        assert batch.num_targets == int(real.sum())
        scored += batch.targets_BS[real].tolist()
    assert sorted(scored) == list(range(1, count))


@pytest.mark.case("C25")
def test_the_same_number_for_any_batch_size():
    model, tokens = standin.model(), standin.data().eval_tokens
    losses = [evaluate_tokens(model, tokens, length=16, stride=8, batch=size).loss for size in (1, 7, 64)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_one_window_is_the_plain_loss_and_more_context_helps_or_not_but_counts_the_same():
    model, tokens = standin.model().eval(), standin.data().eval_tokens[:33]
    found = evaluate_tokens(model, tokens, length=32)
    assert found.count == 32
    assert found.loss == pytest.approx(standin.loss_of(model, tokens).item(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert evaluate_tokens(model, tokens, length=8, stride=4).count == 32


def test_perplexity_does_not_move_with_the_auxiliary_coefficient():
    losses = [
        evaluate_tokens(standin.model(coefficient=c), standin.data().eval_tokens, length=32).loss for c in (0.0, 100.0)
    ]
    assert losses[0] == losses[1]


def test_the_mode_comes_back_and_bad_arguments_are_refused():
    model, tokens = standin.model(), standin.data().eval_tokens
    evaluate_tokens(model.train(), tokens, length=16, most_batches=1)
    assert model.training
    with pytest.raises(ValueError, match="stride must be between 1 and length = 8"):
        evaluate_tokens(model, tokens, length=8, stride=9)
    with pytest.raises(ValueError, match="N >= 2"):
        evaluate_tokens(model, tokens[:1], length=8)
