"""The table of families in the docs is what running them gives, and no family of transformers is missing from it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from tests.models.examine import examine
from tests.models.more_families import ALL

DOCS = Path(__file__).parents[2] / "docs"


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_families", DOCS / "make_families.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_what_running_gives(name: str) -> None:
    maker = _maker()
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    found = examine(name, ALL[name])
    assert maker.row(name, found) in page.splitlines()
    assert all(note in page.splitlines() for note in maker.notes(name, found))


def test_no_family_of_transformers_is_missing() -> None:
    """Every modelling file that holds a bank of experts and a router is in the table."""
    folder = Path(transformers.__file__).parent / "models"
    bank = re.compile(r"class \w+(Experts|SparseMLP|SparseMoeBlock|ParallelExperts|CDMoE)\(nn\.Module(Dict)?\)")
    found = {file.parent.name for file in folder.glob("*/modeling_*.py") if bank.search(file.read_text("utf-8"))}
    assert found - set(ALL) == set()
