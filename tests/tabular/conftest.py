"""A small network, trained in a second, and tables to use it on."""

import numpy as np
import pytest
import torch

from moesaic.tabular import GatedViewMoE, NetworkConfig, pretrain

SMALL = NetworkConfig(ranks=20, dim=8, hidden=8)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blobs(rng: np.random.Generator, rows: int = 120, width: int = 3) -> np.ndarray:
    centres = rng.normal(size=(2, width)) * 4
    return centres[rng.integers(2, size=rows)] + rng.normal(size=(rows, width))


@pytest.fixture(scope="session")
def network() -> GatedViewMoE:
    rng = np.random.default_rng(0)
    return pretrain([blobs(rng), blobs(rng, 80, 5)], config=SMALL, epochs=40, lr=1e-2, seed=0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
