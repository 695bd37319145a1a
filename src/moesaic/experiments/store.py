"""``results/SLUG.json``: rows as they are measured, each written at once, and what is computed from them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.analysis.machine import machine_facts
from moesaic.experiments.base import Arm, Experiment, Outcome, Row, averages, summarise, summarise_each
from moesaic.experiments.verdict import judge
from moesaic.formats.atomic import atomic_file

SCHEMA = 1


class ResultsFile:
    """The stored rows of one experiment at one size; the layout is written down in ``docs/results-schema.md``.

    Args:
        experiment: whose rows.
        folder: where ``SLUG.json`` (``SLUG.SIZE.json`` at another size) lies or will lie.

    Raises:
        ValueError: the file is of another schema or system, is no JSON, or holds rows of another configuration.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment = experiment
        self.path = folder / f"{experiment.name}.json"
        self._rows: list[dict[str, Any]] = []
        if self.path.exists():
            self._rows = self._checked(read_results(self.path))

    @property
    def rows(self) -> list[Row]:
        """Stored rows, by arm and data set in the experiment's order, then by seed."""
        return [row_of(stored) for stored in self._rows]

    def has(self, arm: Arm, seed: int, dataset: str | None = None) -> bool:
        """Whether this measurement is stored."""
        wanted = (arm.name, seed, dataset)
        return any((row["arm"], row["seed"], row.get("dataset")) == wanted for row in self._rows)

    def add(
        self, arm: Arm, seed: int, outcome: Outcome, seconds: float, command: str, dataset: str | None = None
    ) -> None:
        """Store one measurement; the file is whole at every moment."""
        self.experiment.check_outcome(arm, seed, outcome)
        facts = machine_facts()
        self._rows.append(
            {
                "arm": arm.name,
                "seed": seed,
                **({} if dataset is None else {"dataset": dataset}),
                "fingerprint": self.experiment.fingerprint(arm, dataset),
                "seconds": round(seconds, 2),
                "metrics": dict(outcome.metrics),
                "curves": {name: [float(v) for v in values] for name, values in outcome.curves.items()},
                "command": command,
                "commit": commit(),
                "versions": facts["versions"],
                "cpu": facts["cpu"],
                "cpu_flags": facts["cpu_flags"],
                "threads": self.experiment.threads,
            }
        )
        arms = {a.name: index for index, a in enumerate(self.experiment.arms)}
        datasets = {name: index for index, name in enumerate(self.experiment.axis)}
        self._rows.sort(key=lambda row: (arms[row["arm"]], datasets[row.get("dataset")], row["seed"]))
        self.write()

    def write(self) -> None:
        """Write rows, summary and verdict; the file is replaced whole."""
        with atomic_file(self.path) as file:
            file.write(compact_json(self.document()).encode())

    def document(self) -> dict[str, Any]:
        """The file's contents."""
        experiment, last = self.experiment, self._rows[-1] if self._rows else {}
        return {
            "schema": SCHEMA,
            "slug": experiment.slug,
            **({} if experiment.size is None else {"size": experiment.size}),
            "claim": experiment.claim,
            "verdict": verdict(experiment, self.rows),
            "summary": summarise(self.rows, experiment.datasets),
            **({"by_dataset": summarise_each(self.rows)} if experiment.datasets else {}),
            "seconds": round(sum(row["seconds"] for row in self._rows), 1),
            **{key: last.get(key) for key in ("command", "commit", "versions", "cpu", "cpu_flags", "threads")},
            "version": experiment.version,
            "settings": dict(experiment.settings),
            "arms": [{"name": arm.name, "settings": dict(arm.settings)} for arm in experiment.arms],
            **({"datasets": list(experiment.datasets)} if experiment.datasets else {}),
            "metrics": [dataclasses.asdict(metric) for metric in experiment.metrics],
            "rows": self._rows,
        }

    def _checked(self, stored: Mapping[str, Any]) -> list[dict[str, Any]]:
        experiment = self.experiment
        if stored["slug"] != experiment.slug:
            raise ValueError(f"{self.path} holds results of {stored['slug']!r}, not of {experiment.slug!r}")
        rows: list[dict[str, Any]] = list(stored["rows"])
        if stored.get("size") != experiment.size:
            raise ValueError(
                f"{self.path} holds size {stored.get('size')!r} of {experiment.slug}, not {experiment.size!r}"
            )
        known = {(a.name, name): experiment.fingerprint(a, name) for a in experiment.arms for name in experiment.axis}
        for row in rows:
            expected = known.get((row["arm"], row.get("dataset")))
            if expected != row["fingerprint"]:
                where = f", data set {row['dataset']!r}" if "dataset" in row else ""
                raise ValueError(
                    f"{self.path} holds rows of another configuration: arm {row['arm']!r}, seed {row['seed']}{where}"
                    f" has fingerprint {row['fingerprint']}, the experiment now says {expected or 'no such arm'}"
                    f"{_differences(stored, experiment, row['arm'])}; move the file away or give another --results"
                )
        return rows


def read_results(path: Path) -> dict[str, Any]:
    """The contents of a results file.

    Raises:
        ValueError: not JSON, no results file, or of a schema that this version does not know.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(stored, dict) or "schema" not in stored or "rows" not in stored:
        raise ValueError(f"{path} is no results file: it has no schema and rows")
    if stored["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {stored['schema']}, this version of moesaic reads {SCHEMA}")
    return stored


def row_of(stored: Mapping[str, Any]) -> Row:
    """A row as the experiment's functions take it."""
    names = ("arm", "seed", "fingerprint", "seconds", "metrics", "curves")
    return Row(**{name: stored[name] for name in names}, dataset=stored.get("dataset"))


def verdict(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every criterion judged on ``rows``."""
    per_seed = averages(rows, experiment.datasets)
    return [judge(criterion, per_seed, deterministic=experiment.deterministic) for criterion in experiment.criteria]


@cache
def commit() -> str | None:
    """Commit of the source tree when this process first asked; None outside a checkout.

    A ``+`` behind it says that tracked sources differ from the commit.
    """
    here = str(Path(__file__).parent.parent)
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        )
        changed = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", here],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def compact_json(document: Mapping[str, Any]) -> str:
    """Indented JSON with lists of numbers on one line, so that a diff shows rows and not digits."""
    lists: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: mark(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            if all(isinstance(entry, (int, float, str)) for entry in value):
                lists.append(json.dumps(list(value), allow_nan=False))
                return f"\0{len(lists) - 1}\0"
            return [mark(entry) for entry in value]
        return value

    text = json.dumps(mark(document), indent=1, ensure_ascii=False, allow_nan=False)
    for index, line in enumerate(lists):
        text = text.replace(f'"\\u0000{index}\\u0000"', line, 1)
    return text + "\n"


def _differences(stored: Mapping[str, Any], experiment: Experiment, arm: str) -> str:
    before = next((entry["settings"] for entry in stored.get("arms", []) if entry["name"] == arm), None)
    if before is None or all(entry.name != arm for entry in experiment.arms):
        return ""
    old, new = {**stored["settings"], **before}, experiment.settings_of(experiment.arm(arm))
    changed = [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    return f" ({', '.join(changed)})" if changed else f" (version {stored.get('version')} -> {experiment.version})"
