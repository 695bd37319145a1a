"""Write the stored tables of results/bench/ into the pages that show them.

python benchmarks/fill_docs.py           # every page with a <!-- bench:NAME --> block
python benchmarks/fill_docs.py --check   # change nothing; leave with 1 if a page is not what its file says
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- bench:(?P<name>[\w-]+) -->\n.*?<!-- end of bench -->", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(page)
            if not options.check:
                page.write_text(new, encoding="utf-8")
    print("\n".join(str(page.relative_to(ROOT)) for page in stale) or "every page is as its files say")
    if options.check and stale:
        raise SystemExit(1)


def pages() -> list[Path]:
    """README and all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """``text`` with each block replaced by its stored table; a file that is not there is named."""
    return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    name = match["name"]
    path = ROOT / "results" / "bench" / f"{name}.json"
    body = f"*Not measured yet: `python benchmarks/{name}.py`.*\n"
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        body = f"{_script(name).table(document['rows'])}\n\n{_footer(document)}\n"
    return f"<!-- bench:{name} -->\n{body}<!-- end of bench -->"


def _footer(document: dict[str, Any]) -> str:
    machine = document["machine"]
    torch = machine["versions"]["torch"]
    return f"`{document['command']}`, {machine['cpu']}, {machine['threads']} threads, torch {torch}."


def _script(name: str) -> ModuleType:
    """The benchmark that wrote the file, which knows how to print it."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
