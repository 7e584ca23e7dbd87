"""Finds tool calls written as tags (Qwen3-Coder, Qwen3.5 on), and writes their parameters as JSON as they arrive.

``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: a value is the text between the
tags, less a line break at each end. The function's schema says which values are strings; others are JSON. A parameter
or call that is not closed ends at ``</tool_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pdserve.router.text.tool_calls import CallDelta, State, ToolCallParser, ToolFormat

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\s]+)>")
_FUNCTION_BEGUN = re.compile(r"\s*(<function=[^<>\s]*)?")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^<>]+)>")
_CALL_END = re.compile(r"\s*(</function>|(?=</tool_call>))")
_VALUE_END = re.compile(r"\n?(</parameter>|(</function>\s*)?(?=</tool_call>))")
_MAYBE_VALUE_END = re.compile(r"(\n?(</function>\s*)?(<[/a-z_]*)?)?\Z")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def call_parser(
    style: ToolFormat, new_id: Callable[[], str], offered: Sequence[Mapping[str, Any]] = ()
) -> ToolCallParser:
    """Parser of one answer's calls of the tools ``offered``, as the client sent them."""
    return XmlCallParser(style, new_id, offered) if style.is_xml else ToolCallParser(style, new_id)


class XmlCallParser(ToolCallParser):
    def __init__(self, style: ToolFormat, new_id: Callable[[], str], offered: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(style, new_id)
        functions = [tool.get("function") or tool for tool in offered]
        self._schemas = {each.get("name"): (each.get("parameters") or {}).get("properties") for each in functions}
        self._properties: Mapping[str, Any] = {}
        """Schemas of the parameters of the call that has begun."""
        self._num_parameters = 0
        self._schema: object = None
        """Of the parameter whose value is read."""
        self._is_in_value = self._has_begun = False

    def _read_head(self) -> bool:
        if start := _FUNCTION.match(self._held):
            self._calls.append(CallDelta(self._index, self._new_id(), start["name"], ""))
            self._index += 1
            self._held, self._state, self._num_parameters = self._held[start.end() :], State.ARGUMENTS, 0
            self._properties = self._schemas.get(start["name"]) or {}
            return True
        rest = self._held.lstrip()
        if "<function=".startswith(rest) or _FUNCTION_BEGUN.fullmatch(self._held):
            return False
        return self._give_up()

    def _pass_arguments(self) -> bool:
        if self._is_in_value:
            return self._read_value()
        if start := _PARAMETER.match(self._held):
            self._write(("{", ", ")[self._num_parameters > 0] + json.dumps(start["name"], ensure_ascii=False) + ": ")
            self._schema = self._properties.get(start["name"])
            self._is_in_value, self._has_begun = True, False
            self._num_parameters += 1
            self._held = self._held[start.end() :]
            return True
        if end := _CALL_END.match(self._held):
            self._write("}" if self._num_parameters else "{}")
            self._close(self._held[end.end() :])
            return True
        self._held = self._held.lstrip()
        if any(tag.startswith(self._held[: len(tag)]) for tag in ("<parameter=", "</function>", self._style.closing)):
            return False
        self._held = self._held[self._held.find("<", 1) :] if "<" in self._held[1:] else ""  # between tags is no value
        return True

    def _read_value(self) -> bool:
        if not self._held:
            return False
        is_text = _is_text(self._schema)
        if not self._has_begun:
            self._held, self._has_begun = self._held.removeprefix("\n"), True
            self._write('"' * is_text)
        if end := _VALUE_END.search(self._held):
            value = self._held[: end.start()]
            self._write(_quoted(value) + '"' if is_text else _json_of(value, self._schema))
            self._held, self._is_in_value = self._held[end.end() :], False
            return True
        if is_text and (held := _MAYBE_VALUE_END.search(self._held)):
            self._write(_quoted(self._held[: held.start()]))
            self._held = self._held[held.start() :]
        return False

    def _write(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self._index - 1, "", "", arguments))


def _quoted(text: str) -> str:
    """Inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: object) -> set[str]:
    """Types that a schema names; a value of any type may follow another schema than these."""
    if not isinstance(schema, dict):
        return {"string"}
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return set().union(*map(_types, options))
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    given = schema.get("type") or [_JSON_TYPES.get(type(value), "string") for value in values]
    return set(given if isinstance(given, list) else [given]) or ({"any"} if "$ref" in schema else {"string"})


def _is_text(schema: object) -> bool:
    return _types(schema) == {"string"}


def _json_of(text: str, schema: object) -> str:
    """A value as JSON: as it was written if it is JSON of one of the schema's types, else a string."""
    types, text = _types(schema), text.strip()
    if text in ("True", "False", "None"):  # as Python writes them
        text = {"True": "true", "False": "false", "None": "null"}[text]
    try:
        kind = _JSON_TYPES.get(type(json.loads(text, parse_constant=_refuse)), "string")
    except (ValueError, RecursionError):
        kind = "string"
    is_number = kind == "integer" and "number" in types
    is_json = kind in types or is_number or "string" not in types
    return text if kind != "string" and is_json else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
