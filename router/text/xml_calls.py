"""Finds tool calls written as tags (Qwen3-Coder, Qwen3.5 on), and writes their parameters as JSON as they arrive.

``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: a value is the text between the
tags, less a line break at each end. The function's schema says which values are strings; others are JSON. A string that
its schema bounds has no white space around it, which grammars allow everywhere. A parameter or call that is not closed
ends at ``</tool_call>``. One of an offered function may begin without ``<tool_call>`` where it begins a line and a
parameter or its end follows: other text may name the tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from pdserve.router.text.tool_calls import State, ToolCallParser, ToolFormat

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\s]{1,256})>")
_AFTER_BARE = "<parameter=", "</function>"
"""Follow the beginning of a call without ``<tool_call>``."""
_FUNCTION_BEGUN = re.compile(r"\s*<function=[^<>\s]{0,256}")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^<>]{1,256})>")
_PARAMETER_BEGUN = re.compile(r"<parameter=[^<>]{0,256}")
_CALL_END = re.compile(r"\s*(</function>|(?=</tool_call>))")
_VALUE_END = re.compile(r"\n?(</parameter>|(</function>\s{0,8})?(?=</tool_call>))")
_MAYBE_VALUE_END = re.compile(r"\n?(</function>\s{0,8})?(<[/a-z_]{0,12})?\Z")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
_BOUNDED = "bounded"
"""Stands among the types of a string that keywords of its schema bound."""
_BOUNDS = {"const", "enum", "format", "maxLength", "minLength", "pattern"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def call_parser(style: ToolFormat, new_id: Callable[[], str], offered: Sequence[Mapping[str, Any]]) -> ToolCallParser:
    """Parser of one answer's calls."""
    return (XmlCallParser if style.is_xml else ToolCallParser)(style, new_id, offered)


class XmlCallParser(ToolCallParser):
    _properties: object = None
    """Schemas of the parameters of the call that has begun."""
    _num_parameters = 0
    _types: Set[str] | None = None
    """Of the value that is read."""
    _is_at_start = False
    """Nothing of the value was read."""

    def _read_head(self) -> bool:
        start = _FUNCTION.match(self._held)
        if start and not self._before.strip():
            rest = self._held[start.end() :].lstrip()
            may_follow = any(tag.startswith(rest[: len(tag)]) for tag in _AFTER_BARE)
            if start["name"] not in self._functions or not may_follow:
                return self._give_up()
            if not rest.startswith(_AFTER_BARE):
                return False
        if start:
            self._write_call(start["name"])
            self._held, self._state, self._num_parameters = self._held[start.end() :], State.ARGUMENTS, 0
            self._properties = (self._functions.get(start["name"], {}).get("parameters") or {}).get("properties")
            return True
        if "<function=".startswith(self._held.lstrip()) or _FUNCTION_BEGUN.fullmatch(self._held):
            return False
        return self._give_up()

    def _pass_arguments(self) -> bool:
        if self._types is not None:
            return self._read_value(self._types)
        if start := _PARAMETER.match(self._held):
            self._write(("{", ", ")[self._num_parameters > 0] + json.dumps(start["name"], ensure_ascii=False) + ": ")
            properties = self._properties if isinstance(self._properties, dict) else {}
            self._types, self._is_at_start, self._num_scanned = _types(properties.get(start["name"])), True, 0
            self._num_parameters += 1
            self._held = self._held[start.end() :]
            return True
        if end := _CALL_END.match(self._held):
            self._write("}" if self._num_parameters else "{}")
            self._close(self._held[end.end() :])
            return True
        self._held = self._held.lstrip()
        tags = ("<parameter=", "</function>", self._style.closing)
        if any(tag.startswith(self._held) for tag in tags) or _PARAMETER_BEGUN.fullmatch(self._held):
            return False
        _, opening, rest = self._held[1:].partition("<")  # text between tags, and a malformed one, is no value
        self._held = opening + rest
        return True

    def _read_value(self, types: Set[str]) -> bool:
        if not self._held:
            return False
        is_text = types == {"string"}
        if self._is_at_start:
            self._held, self._is_at_start = self._held.removeprefix("\n"), False
            self._write('"' if is_text else "")
        if end := _VALUE_END.search(self._held, self._num_scanned):
            value = self._held[: end.start()]
            self._write(_quoted(value) + '"' if is_text else _json_of(value, types))
            self._held, self._types = self._held[end.end() :], None
            return True
        maybe_end = _MAYBE_VALUE_END.search(self._held, self._num_scanned)
        assert maybe_end is not None
        self._num_scanned = maybe_end.start()
        if is_text:
            self._write(_quoted(self._held[: self._num_scanned]))
            self._held, self._num_scanned = self._held[self._num_scanned :], 0
        return False


def _quoted(text: str) -> str:
    """Inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: object) -> Set[str]:
    """Types that a client's schema, of any form, allows; without a hint a string."""
    if not isinstance(schema, dict):
        return {"string"}
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return {name for option in options for name in _types(option)}
    given = schema.get("type")
    if given is None and isinstance(values := schema.get("enum"), list):
        given = [_JSON_TYPES.get(type(value), "string") for value in values]
    names = {str(name) for name in (given if isinstance(given, list) else [given]) if name}
    names = names or ({"any"} if "$ref" in schema else {"string"})
    return names | {_BOUNDED} if schema.keys() & _BOUNDS else names


def _json_of(text: str, types: Set[str]) -> str:
    """A value as JSON: as it was written if it is JSON of one of the types, else a string."""
    written = _PYTHON.get(text.strip(), text.strip())  # NaN, which JSON lacks, is no int either
    try:
        kind = _JSON_TYPES.get(type(json.loads(written, parse_constant=int)), "string")
    except (ValueError, RecursionError):
        kind = "string"
    is_allowed = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return (
        written if kind != "string" and is_allowed else _quoted(text.strip() if _BOUNDED in types else text).join('""')
    )
