"""Reading config dataclasses from YAML: every unknown key and every wrong type is refused, with what is allowed."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moesaic.training.config import BUNDLED, RunConfig

Config = TypeVar("Config")


def read_run_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's config file.

    Args:
        path: YAML with the keys of :class:`RunConfig`.
        overrides: ``"train.steps=100"``, values in YAML; applied in order.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML mapping, an unknown key (the allowed ones are named), a value of another type or out of
            range, a malformed override.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config {str(path)!r} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold a mapping with the keys model, data, train, out; got {type(values).__name__}"
        )
    for override in overrides:
        apply_override(values, override)
    config = from_mapping(RunConfig, values)
    data_path = Path(config.data.path)
    if config.data.path != BUNDLED and not data_path.is_absolute() and not data_path.exists():
        config.data.path = str(path.parent / data_path)
    return config


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set ``"a.b=VALUE"`` in nested mappings.

    Raises:
        ValueError: no ``=``, or a path through something that is no mapping.
    """
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set is {override!r}; it must read KEY.KEY=VALUE, such as train.steps=100")
    place = values
    for depth, key in enumerate(keys[:-1]):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a group of keys")
    try:
        place[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override!r}: the value is not YAML: {error}") from error


def from_mapping(kind: type[Config], values: Mapping[str, Any], where: str = "") -> Config:
    """Build a config dataclass from plain values.

    Args:
        kind: a dataclass; its fields may be dataclasses, lists of them, numbers, strings, mappings.
        values: key -> value.
        where: dotted name of this part, for messages.

    Raises:
        ValueError: unknown or missing keys, wrong types, values the dataclass refuses.
    """
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields), key=str)
    if unknown:
        raise ValueError(f"unknown key {_join(where, unknown[0])!r}; allowed are {sorted(fields)}")
    missing = [
        name
        for name, item in fields.items()
        if name not in values and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"key {_join(where, missing[0])!r} is missing; {where or 'the config'} needs {missing}")
    arguments = {key: _convert(hints[key], value, _join(where, key)) for key, value in values.items()}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        return _convert(next(option for option in options if option is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, _expect(dict, value, where, "a group of keys"), where)  # type: ignore[arg-type]
    if origin is list:
        items = _expect(list, value, where, "a list")
        return [_convert(options[0], item, f"{where}[{index}]") for index, item in enumerate(items)]
    if origin is tuple:
        items = _expect((list, tuple), value, where, f"a list of {len(options)} values")
        if len(items) != len(options):
            raise ValueError(f"{where} must be a list of {len(options)} values, got {value!r}")
        return tuple(_convert(option, item, f"{where}[{i}]") for i, (option, item) in enumerate(zip(options, items)))
    if origin is dict:
        items = _expect(dict, value, where, "a group of keys")
        return {str(key): _convert(options[1], item, _join(where, str(key))) for key, item in items.items()}
    return value if hint is Any else _scalar(hint, value, where)


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a word
        except (TypeError, ValueError):
            pass
    elif hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
    elif isinstance(value, hint):
        return value
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    raise ValueError(f"{where} must be {names.get(hint, hint.__name__)}, got {value!r}")


def _expect(kind: Any, value: Any, where: str, name: str) -> Any:
    if value is None and kind is dict:
        return {}
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {name}, got {value!r}")
    return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)
