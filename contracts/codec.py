"""Converts frozen dataclasses to plain JSON or YAML values and back: the codec of all configuration.

Strict: an unknown key, a missing key without a default, or a value of the wrong type raises `ConfigError`, which names
the key and the remedy. Field types are the schema: numbers, text, enums (by value), tuples, mappings, unions, nested
dataclasses, and ``Annotated`` with a `Rule` on the values.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar

from pdserve.contracts.errors import ConfigError

T = TypeVar("T")


class Rule(NamedTuple):
    """Constraint on a field's values, part of its type: ``Annotated[int, between(1, 64)]``."""

    holds: Callable[[Any], bool]
    to_write: str
    """Remedy; follows "write" in the error message."""


def between(low: int, high: int) -> Rule:
    return Rule(lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, f"one of {', '.join(names)}")


ABOVE_ZERO = Rule(lambda value: 0 < value < inf, "a number above 0")
Positive = Annotated[float, ABOVE_ZERO]
NotNegative = Annotated[float, Rule(lambda value: 0 <= value < inf, "0 or a number above it")]
Fraction = Annotated[float, Rule(lambda value: 0 < value <= 1, "a share above 0 and up to 1: 0.9 for 90 %")]

_TO_WRITE: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
    tuple: "a list in brackets",
    dict: "keys and values below it",
    Mapping: "keys and values below it",
}


def to_plain(value: Any) -> Any:
    """Convert ``value`` to plain values: dataclasses and mappings to dicts, tuples to lists, enums to their values."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def to_json(value: Any) -> str:
    return json.dumps(to_plain(value))


def from_json(kind: type[T], text: str | bytes, name: str) -> T:
    """Read a ``kind`` from the output of `to_json`; error messages call the document ``name``.

    Raises:
        ConfigError: invalid JSON, an unknown or missing key, or a bad value.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    return from_plain(kind, value, name)


def from_plain(kind: type[T], value: object, name: str, key: str = "") -> T:
    """Build the dataclass ``kind`` from plain values.

    Args:
        name: name of the document in error messages.
        key: path of ``value`` in the document; empty at the top.

    Raises:
        ConfigError: an unknown or missing key, or a bad value.
    """
    fields = read_fields(kind, value, name, key)
    required = inspect.signature(kind).parameters.values()
    missing = [each.name for each in required if each.default is each.empty and each.name not in fields]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise ConfigError(f"{key or name} lacks {', '.join(missing)}; write {them}", key)
    try:
        return kind(**fields)
    except ValueError as error:
        raise ConfigError(f"{key or name}: {error}", key) from error


def read_fields(kind: type, value: object, name: str, key: str = "") -> dict[str, Any]:
    """Read and check the fields of a dataclass that ``value`` sets; absent fields stay absent.

    Args:
        name: name of the document in error messages.
        key: path of ``value`` in the document; empty at the top.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key or name} holds {_shown(value)}; write keys and values, as in {{key: value}}", key)
    types = _types(kind)
    read = {}
    for field, item in value.items():
        below = f"{key}.{field}" if key else str(field)
        if field not in types:
            raise ConfigError(f"unknown key {str(field)!r} in {key or name}{nearest(str(field), types)}", below)
        default = _sections(kind).get(field)
        if default is None:
            read[field] = read_value(types[field], item, name, below)
        elif item is not None:  # absent keys keep the section's defaults
            given = read_fields(type(default), item, name, below)
            try:
                read[field] = dataclasses.replace(typing.cast(Any, default), **given)
            except ValueError as error:
                raise ConfigError(f"{below}: {error}", below) from error
    return read


def read_value(kind: Any, value: object, name: str, key: str, to_write: str = "") -> Any:
    """Read ``value`` as a ``kind``, which may be any field annotation.

    Args:
        to_write: remedy in errors about the type; empty for the type's name.
    """
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        rule: Rule = arguments[1]
        read = read_value(arguments[0], value, name, key, rule.to_write)
        if not rule.holds(read):
            raise ConfigError(f"{key} is {read!r}; write {rule.to_write}", key)
        return read
    if origin in (typing.Union, UnionType):
        return _alternative(arguments, value, name, key, to_write)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else from_plain(kind, value, name, key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(each.value) for each in kind)
            raise ConfigError(f"{key} is {value!r}; write one of {names}", key) from None
    if origin is tuple and isinstance(value, list | tuple):
        return _tuple(arguments, value, name, key, to_write)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {
            read_value(arguments[0], str(each), name, key): read_value(arguments[1], item, name, f"{key}.{each}")
            for each, item in value.items()
        }
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{key} is larger than any number that is of use; write a smaller one", key) from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if origin is None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{key} is {_shown(value)}; write {to_write or _TO_WRITE[origin or kind]}", key)


def nearest(key: str, valid: Iterable[str]) -> str:
    """Tail of an error message about ``key``: the most similar valid key, then all valid keys."""
    valid = list(valid)
    (likely,) = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return f"; did you mean {likely!r}? (valid: {', '.join(valid)})"


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def _sections(kind: type) -> dict[str, object]:
    """Defaults of dataclass fields; absent keys of a section keep these values."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }
    return {name: value for name, value in defaults.items() if dataclasses.is_dataclass(value)}


def _alternative(kinds: tuple[Any, ...], value: object, name: str, key: str, to_write: str) -> Any:
    """Read ``value`` as the first of ``kinds`` that accepts it; a single kind raises its own errors."""
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) == 1:
        return read_value(kinds[0], value, name, key, to_write)
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    for origin in origins:
        if isinstance(value, origin) and not isinstance(value, bool):
            return value
    words = " or ".join(_TO_WRITE[origin] for origin in origins)
    raise ConfigError(f"{key} is {_shown(value)}; write {to_write or words}", key)


def _tuple(kinds: tuple[Any, ...], value: Sequence[object], name: str, key: str, to_write: str) -> Any:
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ConfigError(f"{key} is {list(value)!r}; write {to_write or f'{len(kinds)} values in brackets'}", key)
    return tuple(
        read_value(kind, item, name, f"{key}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _shown(value: object) -> str:
    return "empty" if value is None else f"{value!r} ({type(value).__name__})"
