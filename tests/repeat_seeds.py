"""The suite under several seeds: ``python tests/repeat_seeds.py --seeds 10``.

The first seed runs everything and notes which tests draw random numbers (from the global generators, from fixtures that
do, or by hypothesis); the others run those. A test that draws none gives the same under every seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", default="2")
    options, more = parser.parse_known_args()
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # hypothesis draws anew
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "random"
        for seed in range(options.seeds):
            which = [f"--list-random={listed}"] if seed == 0 else [f"--only-listed={listed}"]
            command = [sys.executable, "-m", "pytest", "-n", options.workers, f"--seed={seed}"]
            command += [f"--hypothesis-seed={seed}", *which, *more]
            start = time.perf_counter()
            code = subprocess.run(command, env=environment).returncode
            print(
                f"seed {seed}: {'passed' if code == 0 else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True
            )
            failed += [seed] if code else []
    print(f"{options.seeds - len(failed)} of {options.seeds} seeds passed" + (f"; failed: {failed}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
