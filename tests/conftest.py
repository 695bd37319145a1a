"""What all tests share."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=30)
settings.load_profile("default")


def require(tool: str) -> str:
    """Path of ``tool``; without it the test fails in CI and skips elsewhere, naming what is missing."""
    path = shutil.which(tool)
    if path is None:
        message = f"{tool} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
