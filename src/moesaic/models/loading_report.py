"""What transformers reports after loading, made an error where it only prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROBLEMS = {
    "missing_keys": "missing",
    "unexpected_keys": "left over (of another model or layout)",
    "mismatched_keys": "of another shape",
    "error_msgs": "failed",
}


def check_loading(where: str, report: Mapping[str, Any], shown: int = 5) -> None:
    """Refuse a model that did not get exactly its tensors: the others would be random, and generate fluent nonsense.

    Args:
        where: path of the checkpoint, for the message.
        report: what ``from_pretrained(..., output_loading_info=True)`` returns beside the model.
        shown: tensors named for each problem.

    Raises:
        ValueError: tensors missing, left over, or of another shape, all counted and the first ones named.
    """
    problems = []
    for key, words in _PROBLEMS.items():
        entries = report.get(key) or ()
        names = sorted({str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries})
        if names:
            more = f" and {len(names) - shown} more" if len(names) > shown else ""
            problems.append(f"{len(names)} tensors {words}: {', '.join(names[:shown])}{more}")
    if problems:
        raise ValueError(f"{where} does not hold this model: {'; '.join(problems)}")
