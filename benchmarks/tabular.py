"""Time and memory of the one-for-all detector beside PyOD's KNN and LOF on the same table, one process each.

    python benchmarks/tabular.py            # the comparison, then ours at 100,000 x 50; resumable
    python benchmarks/tabular.py --quick    # 2,000 rows, nothing stored

The large run checks the promise of docs/methods/ofa-tad.md: at most 10 minutes and 2 GB on two cores. Run it alone on
the machine; results/bench/tabular.json keeps the rows.
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

ROOT = Path(__file__).resolve().parent.parent
DETECTORS = ("ours", "KNN (pyod)", "LOF (pyod)")
# detector, normal rows, rows to score, columns
RUNS = [(name, 10_000, 2_000, 20) for name in DETECTORS] + [("ours", 100_000, 2_000, 50)]
QUICK = [(name, 2_000, 500, 10) for name in DETECTORS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "bench" / "tabular.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, *sizes = options.child
        print(json.dumps(measure(name, *map(int, sizes), options.threads)))
        return
    stored: dict[str, Any] = {"rows": []}
    if not options.quick and options.results.exists():
        stored = json.loads(options.results.read_text())
    run_missing(stored, options)
    print(table(stored["rows"]))


def run_missing(stored: dict[str, Any], options: argparse.Namespace) -> None:
    """Measure what is not stored yet; store each row as it comes."""
    from moesaic.analysis.machine import machine_facts
    from moesaic.formats.atomic import atomic_file

    done = {(row["detector"], row["rows"], row["queries"], row["columns"]) for row in stored["rows"]}
    for run in QUICK if options.quick else RUNS:
        if run in done:
            continue
        command = [sys.executable, __file__, f"--threads={options.threads}", "--child", *map(str, run)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        stored["rows"].append(json.loads(answer.stdout))
        stored["machine"] = machine_facts() | {"threads": options.threads}
        stored["command"] = "python benchmarks/tabular.py"
        if not options.quick:
            with atomic_file(options.results) as file:
                file.write(json.dumps(stored, indent=1).encode() + b"\n")


def normal_rows(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ten overlapping clusters with correlated columns, the same for every detector."""
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(columns, columns)) / np.sqrt(columns)
    return (rng.normal(size=(10, columns)) * 2)[rng.integers(10, size=rows)] + rng.normal(size=(rows, columns)) @ mix


def measure(name: str, rows: int, queries: int, columns: int, threads: int) -> dict[str, Any]:
    """Seconds to fit and to score, and the most memory of this process, before and after."""
    import torch

    torch.set_num_threads(threads)
    values = normal_rows(rows + queries, columns)
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


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line a run."""
    lines = [
        "| detector | normal rows x columns | fit, s | score, s (rows) | peak memory, MB (before fitting) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['detector']} | {row['rows']:,} x {row['columns']} | {row['fit_s']:.1f} | {row['score_s']:.1f}"
            f" ({row['queries']:,}) | {row['peak_mb']:.0f} ({row['start_mb']:.0f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
