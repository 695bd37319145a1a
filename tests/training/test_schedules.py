"""Learning-rate schedules at their ends, corners and between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.training.config import SCHEDULES, ScheduleConfig
from moesaic.training.schedules import schedule_factor


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "constant"])
def test_from_one_to_final(kind):
    config = ScheduleConfig(kind=kind, warmup=0, final=0.1)
    assert schedule_factor(config, 0.0, 0) == 1.0
    assert schedule_factor(config, 1.0, 99) == pytest.approx(0.1)


def test_corners():
    wsd = ScheduleConfig(kind="wsd", warmup=0, decay=0.25)
    assert schedule_factor(wsd, 0.75, 5) == 1.0
    assert schedule_factor(wsd, 0.875, 5) == pytest.approx(0.5)
    cosine = ScheduleConfig(kind="cosine", warmup=0)
    assert schedule_factor(cosine, 0.5, 5) == pytest.approx(0.5)
    assert schedule_factor(ScheduleConfig(kind="constant", warmup=0), 0.9, 5) == 1.0


def test_warmup_is_linear_in_steps():
    config = ScheduleConfig(kind="constant", warmup=4)
    assert [schedule_factor(config, 0.0, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@given(
    st.sampled_from(SCHEDULES),
    st.floats(-1, 2),
    st.integers(0, 50),
    st.integers(0, 30),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_always_between_zero_and_one(kind, progress, step, warmup, decay, final):
    config = ScheduleConfig(kind=kind, warmup=warmup, decay=decay, final=final)
    assert 0 <= schedule_factor(config, progress, step) <= 1
