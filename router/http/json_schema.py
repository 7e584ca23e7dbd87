"""Checks that workers can enforce all of a JSON schema before it becomes a request's grammar.

xgrammar 0.2 ignores some keywords without a word, so that an answer could break the schema. A schema that has one is
refused by the keyword's name and place. Not refused: ``oneOf`` is enforced as ``anyOf``, as by vLLM, and a ``format``
that xgrammar does not know is an annotation, as in the standard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Member = TypeVar("Member", list[Any], dict[str, Any])

MAX_DEPTH = 64
"""Nested schemas, each with its lists and maps."""

_ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
})  # fmt: skip
_NEVER = frozenset({
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "then", "uniqueItems",
})  # fmt: skip
_ALONE = ("$ref", "allOf", "anyOf", "oneOf")
"""Beside one of these, other constraints are ignored."""
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_BROKEN_FORMATS = ("json-pointer", "relative-json-pointer")
"""Enforced by rules that let quotes and control characters into the string."""
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_CONTENTS = frozenset({"const", "enum", "items", "prefixItems", "properties"})
"""More is lost without these than without what would stand alone."""
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_SCHEMAS = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


class SchemaError(ValueError):
    """A schema that cannot be enforced; the text names the place and the remedy."""

    def __init__(self, message: str, *keywords: str) -> None:
        """``keywords``: those without which the schema is free of this fault."""
        super().__init__(message)
        self.keywords = keywords


def check_json_schema(schema: object) -> object:
    """Check a schema and those inside it; return it as workers read it.

    Raises:
        SchemaError: it is no schema, or some of it cannot be enforced.
    """
    return _read(schema, "#", 0, drops=False)


def enforceable(schema: object) -> object:
    """A schema without the keywords that cannot be enforced, and with anything in place of what is no schema."""
    return _read(schema, "#", 0, drops=True)


def _read(schema: object, place: str, depth: int, *, drops: bool) -> object:
    """The schema; what cannot be enforced is dropped, or raises `SchemaError`."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        if drops:
            return True
        if isinstance(schema, dict):
            raise SchemaError(f"{place} is nested more than {MAX_DEPTH} schemas deep; flatten it")
        raise SchemaError(f"{place} should be a schema: an object, true or false")
    kept = dict(schema)
    if isinstance(kept.get("items"), list) and "prefixItems" not in kept:  # before 2020-12, as zod-to-json-schema does
        kept |= {"prefixItems": kept["items"], "items": kept.pop("additionalItems", True)}
    while True:
        try:
            _check_keywords(kept, place)
            break
        except SchemaError as error:
            if not drops:
                raise
            for name in error.keywords:
                del kept[name]
    for name in filter(kept.__contains__, _LISTS_OF_SCHEMAS):
        inner = enumerate(kept[name])
        kept[name] = [_read(each, f"{place}/{name}/{index}", depth + 1, drops=drops) for index, each in inner]
    for name in filter(kept.__contains__, _MAPS_OF_SCHEMAS):
        inner = kept[name].items()
        kept[name] = {key: _read(each, f"{place}/{name}/{key}", depth + 1, drops=drops) for key, each in inner}
    for name in filter(kept.__contains__, _SCHEMAS):
        is_name = name == "propertyNames" and isinstance(kept[name], dict)
        each = {"type": "string", **kept[name]} if is_name else kept[name]
        kept[name] = _read(each, f"{place}/{name}", depth + 1, drops=drops)
    return kept


def _check_keywords(schema: dict[str, object], place: str) -> None:
    """Check a schema, but not those inside it."""
    if schema.get("format") in _BROKEN_FORMATS:
        raise SchemaError(f"{place} has the format {schema['format']}, which is not supported; leave it out", "format")
    for name in schema:
        if name in _NEVER and schema[name] is not False:
            raise SchemaError(f"{place} has {name}, which is not supported; leave it out", name)
    for name in _LISTS_OF_SCHEMAS:
        _member(schema, name, place, list)
    for name in _MAPS_OF_SCHEMAS:
        _member(schema, name, place, dict)
    _check_types(schema, place)
    _check_together(schema, place)


def _member(schema: dict[str, object], name: str, place: str, kind: type[Member]) -> Member:
    value = schema.get(name, kind())
    if not isinstance(value, kind):
        raise SchemaError(f"{place}/{name} should be {'a list' if kind is list else 'an object'}", name)
    return value


def _check_types(schema: dict[str, object], place: str) -> None:
    """Check ``type``, the keywords that need one, and that the values of ``enum`` and ``const`` have it."""
    named = schema.get("type")
    several = named if isinstance(named, list) else [named]
    types = list(dict.fromkeys(name for name in several if isinstance(name, str)))  # each value is held against all
    if not set(types) <= _TYPES.keys() or ("type" in schema and not types):
        raise SchemaError(f"{place}/type should be one of {', '.join(_TYPES)}, or a list of them", "type")
    for name in (*_OF_STRINGS, *_OF_NUMBERS):
        if name in schema and not types:
            raise SchemaError(f"{place} has {name} and no type; add the type", name)
    if "multipleOf" in schema and types != ["integer"]:
        message = f"{place} has multipleOf, which is supported for the type integer only; leave it out"
        raise SchemaError(message, "multipleOf")
    for value in [*_member(schema, "enum", place, list), *([schema["const"]] if "const" in schema else [])]:
        if types and not any(_has_type(value, one) for one in types):
            message = f"{place} has the value {str(value)[:40]!r}, which is not of its type; leave it out"
            raise SchemaError(message, "type")


def _has_type(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (not isinstance(value, bool) or name == "boolean")


def _check_together(schema: dict[str, object], place: str) -> None:
    """Check keywords of which only one would be enforced."""
    constraints = {name for name in schema if name not in _ANNOTATIONS}
    for name in _ALONE:
        if name in constraints and len(constraints) > 1:
            ignored = sorted(constraints - {name})
            message = f"{place} has {', '.join(ignored)} beside {name}, which is not supported; move them into it"
            raise SchemaError(message, *([name] if constraints & _CONTENTS else ignored))
    if len(_member(schema, "allOf", place, list)) > 1:
        raise SchemaError(f"{place}/allOf has several schemas, which is not supported; merge them", "allOf")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(f"{place}/$ref should refer to a part of this schema, such as #/$defs/name", "$ref")
    for name in {"enum", "const"} & constraints:
        if ignored := sorted(constraints - {"type", name}):
            message = f"{place} has {', '.join(ignored)} beside {name}, which is not supported; leave it out"
            raise SchemaError(message, *ignored)
    both = sorted(constraints & set(_OF_STRINGS))
    if len(both) > 1 and {"pattern", "format"} & {*both}:
        message = f"{place} has {', '.join(both)} together, which is not supported; keep one of them"
        raise SchemaError(message, *(name for name in both if name != ("pattern" if "pattern" in both else "format")))
    if {"properties", "patternProperties"} <= constraints:
        message = f"{place} has patternProperties beside properties, which is not supported; keep one of them"
        raise SchemaError(message, "patternProperties")
    required = _member(schema, "required", place, list)
    missing = [
        name for name in required if not isinstance(name, str) or name not in _member(schema, "properties", place, dict)
    ]
    if missing:
        message = f"{place}/required has {str(missing[0])[:64]!r}, which is not among the properties; add it"
        raise SchemaError(message, "required")
