"""The lower bounds of pyproject.toml as constraints, one `name==version` a line, for `make test-lowest`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("dev", "tabular")  # what the suite runs with

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in project["optional-dependencies"][extra])]
for requirement in wanted:
    bound = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(?:>=|==)\s*([0-9][^,;\s]*).*", requirement)
    if bound:
        print(f"{bound[1]}=={bound[2]}")
