"""Tools of a chat: which are offered to the model, and the grammar of the calls that are forced or strict.

`pdserve.router.text.tool_calls` finds the calls in the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdserve.contracts.request import Grammar
from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError, refusal
from pdserve.router.http.grammars import structural, structure_of
from pdserve.router.http.json_schema import SchemaError, check_json_schema, enforceable
from pdserve.router.http.schema import ChatBody, TemplatedBody
from pdserve.router.text.chat_template import ChatTemplate
from pdserve.router.text.harmony import EFFORTS
from pdserve.router.text.tool_calls import ToolFormat

_OWN_VARIABLES = frozenset({"add_generation_prompt", "messages", "tools"})
_WISH = re.compile("think|reason")
"""In the names of variables that clients set whatever the model: one that never reasons, or always, cannot follow."""
_NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff<>\"\\]{1,128}")
"""What all forms of calls can have."""
_MODES = {"auto": "auto", "none": "none", "any": "required", "required": "required"}
"""Choices that name no function, as clients write them."""
_NAMING = ("function", "custom")
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


class Tools(NamedTuple):
    """Tools that the model may call."""

    offered: Sequence[Mapping[str, object]]
    """As the client sent them, for the chat template."""
    style: ToolFormat
    grammar: Grammar | None
    """Of the answer, if a call is forced, a tool is strict, or the body requests a structure."""
    may_call_several: bool


class _Function(NamedTuple):
    name: str
    parameters: object
    is_strict: bool


def tools_of(body: ChatBody, style: ToolFormat | None, requested: Grammar | None = None) -> Tools | None:
    """Tools that the body offers; ``None`` if it offers none.

    Args:
        style: how the model writes calls; None if it is not known.
        requested: structure of an answer that calls none.

    Raises:
        ApiError: one is malformed, ``style`` is None, or the body contradicts a forced call.
    """
    offered, choice = _allowed(body.tools or [], body.tool_choice)
    functions = check_tools(offered)
    forced = _forced(choice, functions)
    if not functions or choice == "none":
        return None
    if style is None:
        raise refusal(
            "tools",
            "have no known form in the model's chat template; leave them out, or serve it with `model.tool_format`",
        )
    may_call_several = body.parallel_tool_calls is not False
    grammar = None
    if forced or requested is not None or any(function.is_strict for function in functions.values()):
        grammar = _grammar(style, forced or [*functions.values()], bool(forced), may_call_several, requested)
    if grammar is not None and body.ignore_eos:
        raise refusal("ignore_eos", "contradicts forced and strict tools; leave it out")
    return Tools(offered, style, grammar, may_call_several)


def check_tools(tools: Sequence[object]) -> Mapping[str, _Function]:
    """Functions of ``tools``, by name.

    Raises:
        ApiError: one is malformed, or there twice.
    """
    functions = {}
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools.{index}")
        if function.name in functions:
            raise refusal(f"tools.{index}.function.name", f"{function.name!r} is there twice; rename one")
        functions[function.name] = function
    return functions


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def template_options(body: TemplatedBody, template: ChatTemplate | None) -> Mapping[str, object]:
    """Variables that a client sets in the chat template. ``reasoning_effort`` is one of them where the template reads
    it, the nearest that the model knows; templates that can only turn reasoning on and off have ``enable_thinking``.

    Raises:
        ApiError: the template does not read one that is no wish about reasoning, or it is not the client's to set.
    """
    known = frozenset() if template is None else template.variables - _OWN_VARIABLES
    given = {
        name: value
        for name, value in (body.chat_template_kwargs or {}).items()
        if name in known or not _WISH.search(name)
    }
    for name in given:
        if name not in known or name.endswith("_token"):
            message = f"has {name[:MAX_NAME_CHARS]!r}, which the model's chat template does not read; leave it out"
            raise refusal("chat_template_kwargs", message)
    match body.reasoning_effort:
        case None:
            return given
        case effort if "reasoning_effort" in known:
            return {
                "reasoning_effort": EFFORTS.get(effort, effort) if template and template.is_harmony else effort,
                **given,
            }
        case effort if "enable_thinking" in known:
            return {"enable_thinking": effort != "none", **given}
        case _:  # a wish, which the model cannot follow
            return given


def _function(tool: object, place: str) -> _Function:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refusal(place, 'should be {"type": "function", "function": {"name": "...", ...}}')
    name, parameters, is_strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal(f"{place}.function.name", "should have 1 to 128 characters, no spaces, quotes, < or >")
    if parameters and not isinstance(parameters, dict):
        raise refusal(f"{place}.function.parameters", "should be a JSON schema, an object")
    if not isinstance(is_strict, bool | None):
        raise refusal(f"{place}.function.strict", "should be true or false")
    return _Function(name, parameters or _ANY_OBJECT, bool(is_strict))


def _allowed(tools: list[dict[str, object]], choice: object) -> tuple[list[dict[str, object]], object]:
    """Tools among which the model may choose, and the choice: a name, or an object that names a function."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        listed = inner.get("tools") if isinstance(inner, dict) else None
        if isinstance(listed, list):
            names = [*map(_name, listed)]
            tools, choice = [tool for tool in tools if _name(tool) in names], inner.get("mode")
    mode = choice.get("type") if isinstance(choice, dict) else choice or "auto"
    return tools, _MODES.get(mode, choice) if isinstance(mode, str) else choice


def _name(tool: object) -> object:
    """Name in a tool or a choice of one, which may have it inside ``function`` or itself."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _forced(choice: object, functions: Mapping[str, _Function]) -> list[_Function]:
    """Functions of which the model has to call one; empty if it may answer with text."""
    if choice in ("auto", "none"):
        return []
    if choice == "required":
        if not functions:
            raise refusal("tool_choice", "is required, and there are no tools; send some")
        return [*functions.values()]
    name = _name(choice)
    if not isinstance(name, str) or (isinstance(choice, dict) and choice.get("type", "function") not in _NAMING):
        named = '{"type": "function", "function": {"name": "..."}}'
        raise refusal("tool_choice", f"should be auto, none, required, or {named}")
    if name not in functions:
        raise refusal("tool_choice", f"names {name[:64]!r}, which is not among the tools; add it")
    return [functions[name]]


def _grammar(
    style: ToolFormat,
    functions: Sequence[_Function],
    is_forced: bool,
    may_call_several: bool,
    requested: Grammar | None,
) -> Grammar:
    """Grammar of an answer with calls of ``functions``. Unless a call is forced, it may be a text of the requested
    structure instead, or has any text around the calls if none is requested."""
    contents = {each.name: _arguments(style, each, is_exact=is_forced or each.is_strict) for each in functions}
    if style.harmony is not None:
        last = [style.harmony.call(name, content) for name, content in contents.items()]
        if not is_forced:
            last.append(style.harmony.final({"type": "any_text"} if requested is None else structure_of(requested)))
        return structural(style.harmony.messages(last, may_announce=requested is None))
    tags = [_tag(style, name, content) for name, content in contents.items()]
    layout: dict[str, object] = {"tags": tags, "stop_after_first": not may_call_several}
    if is_forced or requested is not None:
        layout |= {"type": "tags_with_separator", "separator": style.separator, "at_least_one": True}
        if requested is not None and not is_forced:
            layout = {"type": "or", "elements": [layout, structure_of(requested)]}
    elif style.opening:
        opening, *others = style.openings
        layout |= {"type": "triggered_tags", "triggers": [opening], "excludes": others}
    else:
        raise ApiError(400, "strict tools need tool_choice to be required with this model", param="tool_choice")
    return structural(layout)


def _arguments(style: ToolFormat, function: _Function, *, is_exact: bool) -> dict[str, object]:
    """Format of a call's arguments."""
    schema = function.parameters if is_exact else _ANY_OBJECT
    if not function.is_strict:
        schema = enforceable(schema)
    try:
        schema = check_json_schema(schema)
    except SchemaError as error:
        message = f"the parameters of the tool {function.name} cannot be enforced: {error}"
        raise ApiError(400, message, param="tools") from error
    # With free white space, some models write nothing else.
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return content | {"style": "qwen_xml"} if style.is_xml else content


def _tag(style: ToolFormat, name: str, content: object) -> dict[str, object]:
    space = style.separator if style.opening else ""
    if style.is_xml:
        begin, end = f"<function={name}>", f"</function>{space}{style.closing}"
    else:
        begin = f'{{"name": "{name}", "{style.arguments_key}": '
        end = f"}}{space}{style.closing if style.opening else ''}"
    return {"type": "tag", "begin": f"{style.opening}{space}{begin}", "content": content, "end": end}
