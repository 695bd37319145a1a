"""README and docs are executed, so they cannot lie."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from moesaic.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<before><!-- not run: [^>]+ -->\n)?^```(?P<kind>python|bash|yaml)\n(?P<code>.*?)^```", re.M | re.S
)


def blocks(page: Path, kind: str) -> list[str]:
    return [m["code"] for m in BLOCK.finditer(page.read_text()) if m["kind"] == kind and not m["before"]]


def commands(code: str) -> list[list[str]]:
    """The `moesaic` commands of a shell block."""
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    return [line[1:] for line in lines if line[:1] == ["moesaic"]]


def run_command(arguments: list[str]) -> None:
    code: object = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    assert not code, f"moesaic {shlex.join(arguments)} ended with {code}"


WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_and_commands_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for number, block in enumerate(BLOCK.finditer(page.read_text())):
        if block["before"]:
            continue
        if block["kind"] == "python":
            exec(compile(block["code"], f"{page.name}[{number}]", "exec"), namespace)
        elif block["kind"] == "bash":
            for arguments in commands(block["code"]):
                run_command(arguments)
        else:  # a run's configuration, for a few steps
            Path("config.yaml").write_text(block["code"])
            run_command(["train", "config.yaml", "--out", f"runs/{number}", "--set", "train.steps=3"])


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


def test_tables_of_benchmarks_equal_their_files():
    fill = runpy.run_path(str(ROOT / "benchmarks" / "fill_docs.py"))
    found = set()
    for page in PAGES:
        text = page.read_text()
        found |= set(re.findall(r"<!-- bench:([\w-]+) -->", text))
        assert fill["filled"](text) == text, f"{page.name}: run python benchmarks/fill_docs.py"
    assert {"quickstart", "tabular"} <= found
