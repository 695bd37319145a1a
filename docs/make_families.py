"""Make docs/families.md by running every family: `PYTHONPATH=. python docs/make_families.py`.

A tiny random model of each goes through every property; what a family refuses stands in the table in its own words.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models.examine import COLUMNS, examine
from tests.models.more_families import ALL

PAGE = Path(__file__).parent / "families.md"
HEAD = """# Families of `transformers`

What `moesaic` can do with each MoE family, found by running a tiny random model of each with transformers {version}
(`python docs/make_families.py` writes this page, a test compares each row with a run).

- **record**: recording leaves the model's output bit-identical. **override**: so does an override that changes nothing;
  another choice is obeyed. **choose**: `call.choose` gives the model's own weights.
- **weights**: each expert is read and written in one convention. **reorder**: inside groups, the output stays.
- **drop**: equals a model in which the dropped experts cannot be chosen. **save**: stock transformers opens the result
  with equal output; **ragged**: `moesaic.load` does where layers differ.
- **fast**: `use_fast_experts` takes over, with the same output.

{counts}

## Worth knowing

- **doge** finds experts by pairs of keys: keys are dropped or reordered, each with all its pairs, never single experts.
- **jetmoe** routes the queries and outputs of its attention too: these layers (`self_attention.experts`) take at most
  as many experts a row as the model does, and share the count in the configuration with the others.
- **llama4** scales what goes into an expert, so its nonlinearity sees the weight; every expert runs on every row.
- **longcat_flash** has experts that return their input: their ids lie behind the others', they count in the load, can
  be forced and dropped (as many in every layer).
- **nllb_moe** as released runs its experts 0 and 1 whatever its router says. A row that keeps the model's choice is
  computed so; a row that is given another choice is computed by the experts that it names.
- **switch_transformers**, **nllb_moe**: an expert that is full leaves a slot empty, also in a choice among the allowed.
- **inkling** weighs chosen and shared experts by one sum: `call.choose` gives the shared ones their new weights too.

## What each can do

"""


def row(name: str, found: Mapping[str, str]) -> str:
    """One line of the table; a refusal is a footnote's number."""
    cells = ["yes" if found[column] == "yes" else "no" for column in COLUMNS[1:]]
    return f"| {name} | {found['layers']} | {' | '.join(cells)} |"


def notes(name: str, found: Mapping[str, str]) -> list[str]:
    """What a family refuses, with its reason."""
    return [f"- **{name}**, {column}: {found[column][4:]}." for column in COLUMNS[1:] if found[column] != "yes"]


def main() -> None:
    """Run all and write the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for name in sorted(ALL):
        found[name] = examine(name, ALL[name])
        sys.stderr.write(row(name, found[name]) + "\n")
    whole = sum(all(value == "yes" for column, value in each.items() if column != "layers") for each in found.values())
    counts = f"{len(found)} families, {whole} of them with every property."
    table = [f"| family | weights of a choice | {' | '.join(COLUMNS[1:])} |", "|---" * (len(COLUMNS) + 1) + "|"]
    table += [row(name, each) for name, each in found.items()]
    reasons = ["", "## What is refused, and why", ""]
    reasons += [line for name, each in found.items() for line in notes(name, each)]
    text = HEAD.format(version=transformers.__version__, counts=counts) + "\n".join([*table, *reasons]) + "\n"
    fresh = PAGE.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(PAGE)


if __name__ == "__main__":
    main()
