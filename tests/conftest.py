"""What all tests share: seeds, threads, tools that may be missing."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=30)
settings.load_profile("default")

_RANDOM_FIXTURES: set[str] = set()  # of wider scope than a function, that drew random numbers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="with a test's name, the seed of its random numbers")
    parser.addoption("--list-random", type=Path, help="append the ids of tests that drew random numbers to this file")
    parser.addoption("--only-listed", type=Path, help="run only the tests whose ids this file lists")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = config.getoption("--only-listed")
    if listed is not None:
        wanted = set(listed.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of wider scope draw from a seed of their own, whichever test comes first to ask for them."""
    if fixturedef.scope == "function":
        return (yield)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param', '')}]", request.config)
    start = _random_state()
    try:
        return (yield)
    finally:
        if _random_state() != start:
            _RANDOM_FIXTURES.add(fixturedef.argname)
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Random numbers of a test follow from its name and ``--seed``."""
    _seed(request.node.nodeid, request.config)
    start = _random_state()
    yield
    listed = request.config.getoption("--list-random")
    if listed is not None:
        drew = _random_state() != start or _RANDOM_FIXTURES & set(request.fixturenames)
        if drew or hasattr(getattr(request, "function", None), "hypothesis"):
            with listed.open("a") as file:
                file.write(f"{request.node.nodeid}\n")


def _seed(name: str, config: pytest.Config) -> None:
    number = zlib.crc32(f"{config.getoption('--seed')}/{name}".encode())
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _random_state() -> tuple[bytes, bytes, int, int]:
    state = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), state["key"].tobytes(), state["pos"], hash(random.getstate())


def require(tool: str) -> str:
    """Path of ``tool``; without it the test fails in CI and skips elsewhere, naming what is missing."""
    path = shutil.which(tool)
    if path is None:
        message = f"{tool} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
