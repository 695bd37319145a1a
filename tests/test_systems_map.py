"""The map of systems in README and docs is the catalogue's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moesaic.catalog import METHODS, systems_map

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- systems -->\n(.*?)<!-- end of systems -->", re.S)


@pytest.mark.parametrize(("page", "links"), [("README.md", "docs/methods/"), ("docs/systems.md", "methods/")])
def test_the_map_of_systems_is_the_catalogue(page, links):
    assert BLOCK.search((ROOT / page).read_text())[1] == systems_map(links)


def test_systems_that_are_there_have_their_page_and_names():
    import importlib

    for method in METHODS:
        page = ROOT / "docs" / "methods" / f"{method.slug}.md"
        assert page.exists() == (method.status == "ready"), method.slug
        for name in method.names:
            module, _, attribute = name.partition(":")
            assert getattr(importlib.import_module(f"moesaic.{module}"), attribute).__doc__
