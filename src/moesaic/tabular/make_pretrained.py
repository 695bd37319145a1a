"""Make the network that ships with the package, and its card: ``python -m moesaic.tabular.make_pretrained``."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from moesaic.data.download import registry
from moesaic.data.tables import load_table, one_class_split, table_names
from moesaic.formats.atomic import atomic_file
from moesaic.tabular.detector import OneForAllDetector
from moesaic.tabular.metrics import auprc, auroc
from moesaic.tabular.training import ASSET, SOURCE_TABLES, pretrain, save_network

logger = logging.getLogger("moesaic.tabular")


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the source tables, measure on every other table, write network and card.

    Args:
        argv: arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m moesaic.tabular.make_pretrained", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "assets", help="where both files go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.folder.mkdir(parents=True, exist_ok=True)
    contexts = [one_class_split(load_table(name)).context for name in SOURCE_TABLES]
    model = pretrain(contexts, seed=args.seed, epochs=args.epochs)
    save_network(model, args.folder / ASSET, {"sources": ", ".join(SOURCE_TABLES), "seed": str(args.seed)})
    scores = {}
    for name in table_names():
        if name not in SOURCE_TABLES:
            split = one_class_split(load_table(name))
            test_scores = -OneForAllDetector(model).fit(split.context).score_samples(split.test)
            scores[name] = (auroc(split.test_labels, test_scores), auprc(split.test_labels, test_scores))
            logger.info("%s: AUROC %.4f, AUPRC %.4f", name, *scores[name])
    card = _card(scores, args.seed, args.epochs, sum(len(context) for context in contexts))
    with atomic_file(args.folder / "CARD.md") as file:
        file.write(card.encode())


def _card(scores: Mapping[str, tuple[float, float]], seed: int, epochs: int, rows: int) -> str:
    files = {Path(name).stem: entry for name, entry in registry().items() if name.startswith("tabular/")}
    sources = "\n".join(f"| {name} | {files[name].source.split(':')[0]} | {_licence(name)} |" for name in SOURCE_TABLES)
    table = "\n".join(f"| {name} | {first:.4f} | {second:.4f} |" for name, (first, second) in scores.items())
    means = [math.fsum(pair[which] for pair in scores.values()) / len(scores) for which in (0, 1)]
    return f"""# one-for-all.safetensors

The network behind `OneForAllDetector()`: OFA-TAD (arXiv:2603.14407) at its published size, four views of a table,
80 neighbours, 128 wide.

**Made by** `python -m moesaic.tabular.make_pretrained --seed {seed} --epochs {epochs}`.

**Use.** Scores rows of a table against normal rows of the same table. The scores rank; they are no calibrated
probabilities. It was never trained on high-dimensional embeddings, images or text.

**Licence.** The weights come under this package's licence. They derive from the normal rows ({rows} in all, labels used
only to leave anomalies out) of these public tables; no row is stored in them.

| source table | file | licence of the data |
|---|---|---|
{sources}

**Measured** on the tables that it was not trained on: first half of the normal rows as context, the rest and all
anomalies as test, no training on them.

| table | AUROC | AUPRC |
|---|---|---|
{table}
| **mean of {len(scores)}** | **{means[0]:.4f}** | **{means[1]:.4f}** |

`results/ofa-tad.json` holds the comparison with other detectors and over seeds.
"""


def _licence(name: str) -> str:
    entry = registry()[f"tabular/{name}.npz"]
    if "ADBench" in entry.source:
        return "ADBench's copy: BSD-2-Clause; origin: UCI Machine Learning Repository, CC BY 4.0"
    return "UCI Machine Learning Repository, CC BY 4.0"


if __name__ == "__main__":
    main()
