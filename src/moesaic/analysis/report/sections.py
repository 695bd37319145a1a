"""Sections of the report: small functions that other parts register."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from moesaic.analysis.statistics import RoutingStatistics


@dataclasses.dataclass
class Subject:
    """What a report is about.

    Attributes:
        model: the model.
        title: name shown at the top (a path or a model type).
        statistics: where the tokens of the text went.
        tokens: the text of each coloured token, in order; untrusted.
        source: where the text came from.
        extras: what a command adds for its own sections (a cache curve, a table of sizes ...).
    """

    model: nn.Module
    title: str
    statistics: RoutingStatistics
    tokens: list[str]
    source: str
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Section:
    """One section of the page.

    Attributes:
        slug: id on the page, name of its files.
        title: heading.
        html: body; whatever comes from the model or the text must be escaped.
        data: the same as plain values, for ``--json``.
        figures: name -> figure, embedded after the body and written as PNG files.
    """

    slug: str
    title: str
    html: str
    data: dict[str, Any]
    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)


Builder = Callable[[Subject], Section | None]
_builders: dict[str, tuple[int, Builder]] = {}


def register_section(slug: str, order: int) -> Callable[[Builder], Builder]:
    """Add a section to every report; a builder that has nothing to say about a subject returns None.

    Args:
        slug: unique id.
        order: position on the page; the built-in sections use 10, 20, ...

    Raises:
        ValueError: a slug that is taken.
    """

    def add(build: Builder) -> Builder:
        if slug in _builders:
            raise ValueError(f"a report section {slug!r} is registered already")
        _builders[slug] = (order, build)
        return build

    return add


def build_sections(subject: Subject) -> list[Section]:
    """All registered sections that have something to say, in order."""
    ordered = sorted(_builders.values(), key=lambda item: item[0])
    return [section for _, build in ordered if (section := build(subject)) is not None]
