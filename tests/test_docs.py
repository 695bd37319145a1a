"""README and docs are executed, so they cannot lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<before><!-- not run: [^>]+ -->\n)?^```(?P<kind>python|bash)\n(?P<code>.*?)^```", re.M | re.S)


def blocks(page: Path, kind: str) -> list[str]:
    return [m["code"] for m in BLOCK.finditer(page.read_text()) if m["kind"] == kind and not m["before"]]


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}[{number}]", "exec"), namespace)


def test_make_verbs_named_in_pages_exist():
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        verb for page in PAGES for code in blocks(page, "bash") for verb in re.findall(r"^make ([a-z-]+)", code, re.M)
    }
    assert named, "no page names a make verb"
    assert named <= verbs


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+\.(?:md|png|json))", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
