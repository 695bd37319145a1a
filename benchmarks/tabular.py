"""Time and memory of the one-for-all detector beside PyOD's KNN and LOF on the same table, one process each.

``python benchmarks/tabular.py`` compares. With ``--rows 100000 --columns 50 --only ours`` it checks the promise of
``docs/methods/ofa-tad.md``: at most 10 minutes and 2 GB on two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

DETECTORS = ("ours", "KNN (pyod)", "LOF (pyod)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="normal rows")
    parser.add_argument("--queries", type=int, default=2_000, help="rows to score")
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--only", choices=DETECTORS, action="append")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.rows, args.queries, args.columns, args.threads)))
        return
    found = []
    for name in args.only or DETECTORS:
        sizes = (f"--rows={args.rows}", f"--queries={args.queries}", f"--columns={args.columns}")
        command = [sys.executable, __file__, "--child", name, *sizes, f"--threads={args.threads}"]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print_row(found[-1], first=len(found) == 1)
    from moesaic.analysis.machine import machine_facts

    facts = machine_facts()
    print(f"\n{facts['cpu']} ({' '.join(facts['cpu_flags'])}), {args.threads} threads")
    if args.output:
        args.output.write_text(json.dumps({"rows": found, "machine": facts}, indent=1) + "\n")


def table(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ten overlapping clusters with correlated columns, the same for every detector."""
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(columns, columns)) / np.sqrt(columns)
    return (rng.normal(size=(10, columns)) * 2)[rng.integers(10, size=rows)] + rng.normal(size=(rows, columns)) @ mix


def measure(name: str, rows: int, queries: int, columns: int, threads: int) -> dict[str, Any]:
    """Seconds to fit and to score, and the most memory of this process, before and after."""
    import torch

    torch.set_num_threads(threads)
    values = table(rows + queries, columns)
    detector = build(name, threads)
    before = peak_mb()
    start = time.perf_counter()
    detector.fit(values[:rows])
    fitted = time.perf_counter()
    detector.decision_function(values[rows:])
    scored = time.perf_counter()
    return {
        "detector": name,
        "rows": rows,
        "queries": queries,
        "columns": columns,
        "fit_s": fitted - start,
        "score_s": scored - fitted,
        "start_mb": before,
        "peak_mb": peak_mb(),
    }


def build(name: str, threads: int) -> Any:
    if name == "ours":
        from moesaic.tabular import OneForAllDetector

        return OneForAllDetector(n_jobs=threads)
    if name == "KNN (pyod)":
        from pyod.models.knn import KNN

        return KNN(n_jobs=threads)
    from pyod.models.lof import LOF

    return LOF(n_jobs=threads)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_row(row: dict[str, Any], first: bool) -> None:
    if first:
        print("| detector | rows x columns | fit, s | score, s (queries) | peak memory, MB (at start) |")
        print("|---|---|---|---|---|")
    print(
        f"| {row['detector']} | {row['rows']:,} x {row['columns']} | {row['fit_s']:.1f} | {row['score_s']:.1f}"
        f" ({row['queries']:,}) | {row['peak_mb']:.0f} ({row['start_mb']:.0f}) |",
        flush=True,
    )


if __name__ == "__main__":
    main()
