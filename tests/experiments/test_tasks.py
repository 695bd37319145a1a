import numpy as np
import pytest
import torch

from moesaic.experiments import dtop_p, star_routing
from moesaic.experiments.tasks.characters import Characters
from moesaic.experiments.tasks.hmm import HMMMixture
from moesaic.experiments.tasks.toy_lm import ToyLM, evaluate, train
from moesaic.experts import FFNExperts
from moesaic.layers import MoE
from moesaic.routing import TopKRouter


def test_the_mixture_is_repeatable_and_draws_what_it_says() -> None:
    source = HMMMixture(seed=3)
    symbols, models = source.sample(400, 20, np.random.default_rng(0))
    again, _ = HMMMixture(seed=3).sample(400, 20, np.random.default_rng(0))
    assert torch.equal(symbols, again)
    assert symbols.shape == (400, 20)
    assert set(models.tolist()) == set(range(10))
    assert 0 <= int(symbols.min()) <= int(symbols.max()) < 50
    _, few = source.sample(100, 5, np.random.default_rng(1), among=3)
    assert set(few.tolist()) == {0, 1, 2}


def test_frequencies_follow_the_chain() -> None:
    source = HMMMixture(models=1, states=3, symbols=4, transition=1.0, emission=1.0, seed=1)
    symbols, _ = source.sample(4000, 30, np.random.default_rng(0))
    transition, emission = (np.diff(m[0], prepend=0.0) for m in (source._transition, source._emission))
    state = np.full(3, 1 / 3)
    for step in range(30):
        expected = state @ emission
        found = np.bincount(symbols[:, step].numpy(), minlength=4) / 4000
        np.testing.assert_allclose(found, expected, atol=0.04)
        state = state @ transition


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: HMMMixture(models=0), "models must be at least 1, got 0"),
        (lambda: HMMMixture(emission=0.0), "emission must be > 0"),
        (lambda: HMMMixture().sample(2, 2, np.random.default_rng(0), among=11), "among must be between 1 and models"),
        (lambda: Characters(held_out=1.0), "held_out must lie in"),
    ],
)
def test_bad_input(build, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        build()


def test_characters_tile_the_held_out_part() -> None:
    text = Characters()
    assert len(text.alphabet) == 65
    assert len(text.train) + len(text.validation) == 1_115_394
    windows = text.windows(48)
    assert torch.equal(windows[:, 1:].reshape(-1), text.validation[1 : windows.shape[0] * 48 + 1])
    batch = text.batch(5, 48, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 49)
    joined = "".join(text.alphabet[i] for i in batch[0])
    assert joined in "".join(text.alphabet[i] for i in text.train)


def test_the_toy_model_is_causal_and_learns() -> None:
    torch.manual_seed(0)
    moes = [MoE(FFNExperts(16, 8, 4), TopKRouter(16, 4, 2)) for _ in range(2)]
    model = ToyLM(7, 16, 2, 12, moes)
    ids = torch.randint(7, (3, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 7
    assert torch.equal(model(ids)[0][:, :8], model(changed)[0][:, :8])
    pattern = torch.arange(13).repeat(3, 1) % 7
    before, _ = evaluate(model, pattern, 2)
    train(model, lambda step: pattern, steps=30, lr=1e-2, warmup=3, cosine=True, clip=1.0)
    after, batches = evaluate(model, pattern, 2)
    assert after < before - 1
    assert [len(found) for found in batches] == [2, 2]
    assert not model.training


SMALL_STAR = {"steps": 3, "held_out": 64, "batch": 16, "eval_batch": 32}
SMALL_TOP_P = {"steps": 44, "warmup": 2, "windows": 4, "batch": 2, "layers": 2}


@pytest.mark.parametrize("name", list(star_routing.ROUTERS))
def test_every_arm_of_star_measures_the_same_twice(name: str) -> None:
    experiment = star_routing.EXPERIMENT
    arm = experiment.arm(star_routing.arm_name(name, 20))
    settings = {**experiment.settings_of(arm), **SMALL_STAR}
    torch.manual_seed(99)
    one = experiment.measure(settings, 1)
    torch.manual_seed(5)  # the global generator plays no part
    two = experiment.measure(settings, 1)
    experiment.check_outcome(arm, 1, one)
    assert one == two
    assert experiment.measure(settings, 2).metrics["loss"] != one.metrics["loss"]
    assert ("mixture_energy" in one.metrics) == name.startswith("STAR")


@pytest.mark.parametrize("arm", dtop_p.EXPERIMENT.arms, ids=lambda arm: arm.name)
def test_every_arm_of_dtop_p_measures_what_it_declares(arm) -> None:  # type: ignore[no-untyped-def]
    experiment = dtop_p.EXPERIMENT
    outcome = experiment.measure({**experiment.settings_of(arm), **SMALL_TOP_P}, 0)
    experiment.check_outcome(arm, 0, outcome)
    assert len(outcome.curves["layers"]) == 2
    assert bool(outcome.curves["p"]) == (arm.name != dtop_p.TOP_K)
    if arm.name == dtop_p.TOP_K:
        assert outcome.metrics["active"] == 4
