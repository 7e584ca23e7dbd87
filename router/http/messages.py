"""Messages of a conversation: read from any of the APIs, and passed to the chat template in one form.

Clients write the same message in many ways. `ChatMessage`, `messages_of` (OpenAI's responses) and `turns_of`
(Anthropic's messages) read all of them; `forms_of` has those in which a template may accept them.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, GetPydanticSchema, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError, core_schema

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError, refusal
from pdserve.router.http.json_body import Body, Structure
from pdserve.router.http.unsupported_fields import check_extra_fields
from pdserve.router.off_loop import pause
from pdserve.router.text.tool_calls import whole_text

MAX_MESSAGE_CALLS = 128
"""Maximum tool calls in one message."""
MAX_MESSAGES = 2**14
"""Maximum messages in one chat. Each delays other requests, however short it is."""
MAX_CALLS = 2**12
"""Maximum tool calls in one chat. Each is several objects, which collections of garbage go through at once."""
MAX_CALL_VALUES = 2**16
"""Maximum values in the arguments of all calls. No other thread runs while those of one are read or written, or while
all are looked through for garbage."""

_TEXTS = {
    "text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text", "tool_reference": "tool_name",
}  # fmt: skip
"""Type of a part to the member that holds its text."""
_SYSTEM = ("system", "developer")
_MAY_BE_EMPTY = ("assistant", "developer", "system", "tool")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
"""Types of parts with an assistant's reasoning."""
_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""First line of Claude Code's system text. It differs in each request, so that no prefix would be shared."""
_HOSTED_CALLS = (
    "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_approval_request",
    "mcp_approval_response", "mcp_call", "mcp_list_tools", "web_search_call",
)  # fmt: skip
"""Items of tools that another server ran."""

FREE_TEXT = "input"
"""Argument of a custom tool, which the model calls as a function, and of a call whose arguments are no JSON object."""


def _joined_text(value: object) -> str:
    """Text of a message whose content is a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        pause()
        if (inner := _parts_of_document(part)) is not None:
            texts.append(_joined_text(inner))
            continue
        if isinstance(part, str):
            part = {"text": part}
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _TEXTS:
            message = "Parts of the type {kind} are not supported: the model reads text alone"
            raise PydanticCustomError("content", message, {"kind": kind[:MAX_NAME_CHARS]})
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise PydanticCustomError("content", 'Parts should be {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def _parts_of_document(part: object) -> list[object] | None:
    """Texts and parts of a document or of what a search found (Anthropic); None of all else, and of files."""
    match part:
        case {"type": "document", "source": {"type": "text", "data": content}, **rest}:
            pass
        case {"type": "document", "source": {"type": "content", "content": content}, **rest}:
            pass
        case {"type": "search_result", "content": content, **rest}:
            pass
        case _:
            return None
    heads = [text for name in ("title", "source", "context") if isinstance(text := rest.get(name), str)]
    return [*heads, *(content if isinstance(content, list) else [content])]


def call_arguments(value: object) -> dict[str, object]:
    """Arguments of an earlier call as an object, whatever the model wrote: templates go through its members."""
    if isinstance(value, str):
        try:
            read = json.loads(value or "null")
            text = json.dumps(read, ensure_ascii=False) if "\\u" in value else ""
            if (whole := whole_text(text)) is not text:
                read = json.loads(whole)
        except (ValueError, RecursionError):
            return {FREE_TEXT: value}
        value = read if isinstance(read, dict | None) else {FREE_TEXT: value}
    if not isinstance(value, dict | None):
        raise PydanticCustomError("arguments", "Input should be JSON text or an object")
    return value or {}


MessageText = Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, str]])]


class CalledFunction(Body):
    name: str
    arguments: Annotated[
        object, PlainValidator(call_arguments, json_schema_input_type=str | dict[str, object] | None)
    ] = Field(default_factory=dict)
    """JSON text, which may be empty, or an object."""


class ToolCall(Body):
    """Call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class ChatMessage(Body):
    """Message as a client wrote it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageText
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGE_CALLS, fail_fast=True)] | None = None
    """Of an assistant."""
    tool_call_id: str | None = None
    """Call that a tool's message answers."""
    reasoning_content: str | None = None
    """Of an assistant; templates that read it decide what of it the model sees again."""
    reasoning: str | None = None
    """The same (OpenRouter, vLLM)."""
    audio: None = None
    function_call: None = None

    @field_validator("tool_calls")
    @classmethod
    def _are_of_assistant(cls, calls: list[ToolCall] | None, info: core_schema.ValidationInfo) -> list[ToolCall] | None:
        if calls and (role := info.data.get("role", "assistant")) != "assistant":
            raise PydanticCustomError("calls", "Only an assistant has calls; this message is of {role}", {"role": role})
        return calls

    @model_validator(mode="before")
    @classmethod
    def _read_content(cls, message: object) -> object:
        """All but a user's message may have no text. A tool may return any JSON. Reasoning may be among the parts."""
        if not isinstance(message, dict):
            return message
        message = _of_tools(message)
        if isinstance(message.get("content"), str):
            return message
        role, content = message.get("role"), message.get("content")
        if content is None and role in _MAY_BE_EMPTY:
            return {**message, "content": ""}
        if role == "tool" and not _has_parts(content):
            return {**message, "content": msgspec.json.encode(content).decode()}
        if not isinstance(content, list):
            return message
        thoughts = [part for part in content if _is_thought(part)]
        if role != "assistant" or not thoughts:
            return message
        texts = [part.get("thinking", part.get("text")) for part in thoughts]
        reasoning = "".join(text for text in texts if isinstance(text, str))
        return {"reasoning": reasoning, **message, "content": [part for part in content if not _is_thought(part)]}

    def for_template(self) -> Message:
        check_extra_fields(self.model_extra, {})
        message: Message = {"role": self.role, "content": self.content}
        if self.role in _SYSTEM and (billing := _BILLING.match(self.content)):
            message["content"] = self.content[billing.end() :]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
            message["content"] = self.content or None
        return message


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHTS


def _has_parts(content: object) -> bool:
    """Whether a tool's result is a list of parts, rather than one of its own making."""
    return isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and not part.keys().isdisjoint(("type", "text")))
        for part in content
    )


def _of_tools(message: dict[str, object]) -> dict[str, object]:
    """The message with tools in place of functions, OpenAI's first form, in which results had the name of a call."""
    call = message.get("function_call")
    if isinstance(call, dict) and not message.get("tool_calls"):
        calls = [{"id": call.get("name"), "function": call}]
        message = {**message, "function_call": None, "tool_calls": calls}
    if message.get("role") == "function":
        message = {**message, "role": "tool", "tool_call_id": message.get("name")}
    return message


def _bounded_calls(messages: object) -> object:
    """Count all calls, and their values, before those of one are read."""
    structure = Structure(MAX_CALL_VALUES)
    for number, call in enumerate(_calls(messages)):
        if number == MAX_CALLS:
            raise PydanticCustomError("calls", "There may be {most} calls at most", {"most": MAX_CALLS})
        arguments = call.get("arguments")
        text = arguments.encode() if isinstance(arguments, str) else msgspec.json.encode(arguments)
        try:
            structure.add(text)
        except ApiError:
            message = "Calls may have {most} values at most"
            raise PydanticCustomError("arguments", message, {"most": MAX_CALL_VALUES}) from None
        structure.end_text()
    return messages


def _calls(messages: object) -> Iterator[dict[str, object]]:
    """Functions of the calls of messages that have not been checked."""
    for message in messages if isinstance(messages, list) else ():
        pause()
        if not isinstance(message, dict):
            continue
        calls = message.get("tool_calls")
        for call in [*(calls if isinstance(calls, list) else ()), {"function": message.get("function_call")}]:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield function


Message = dict[str, object]
"""Message in the form that chat templates read. Of texts alone, collections of garbage do not go through it."""
_AsMessage = GetPydanticSchema(
    lambda _, schema_of: core_schema.no_info_after_validator_function(ChatMessage.for_template, schema_of(ChatMessage))
)
Messages = Annotated[
    list[Annotated[Message, _AsMessage]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_bounded_calls, json_schema_input_type=list[ChatMessage]),
]


def forms_of(sent: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Forms of a conversation to try one after the other: as it was sent, with one leading system message of all, in
    order, and with that text before the first user's, for templates that refuse the one before."""
    yield sent
    rest = [message for message in sent if message["role"] not in _SYSTEM]
    if len(rest) == len(sent):
        return
    text = "\n\n".join(str(message["content"]) for message in sent if message["role"] in _SYSTEM)
    yield [{"role": "system", "content": text}, *rest]
    for index, message in enumerate(rest):
        if message["role"] == "user":
            yield [*rest[:index], {**message, "content": f"{text}\n\n{message['content']}"}, *rest[index + 1 :]]
            return


def messages_of(
    instructions: str | None, items: Sequence[Mapping[str, Any]], places: dict[str, str]
) -> list[dict[str, Any]]:
    """Messages of a chat with the input of a response.

    Args:
        places: gets the place in the input of each message and call, by its place among the messages.

    Raises:
        ApiError: an item has a type that is not supported.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    message: dict[str, Any]
    reasoning = ""
    for index, item in enumerate(items):
        pause()
        place = f"input.{index}"
        match item.get("type") or "message":
            case "message":
                message = {"role": item.get("role"), "content": item.get("content")}
            case "function_call" | "custom_tool_call":
                continues = messages and not reasoning and messages[-1]["role"] == "assistant"
                message = messages.pop() if continues else {"role": "assistant"}
                calls = message.setdefault("tool_calls", [])
                call_place = f"messages.{len(messages)}.tool_calls.{len(calls)}"
                places |= {call_place: place, f"{call_place}.id": f"{place}.call_id", f"{call_place}.function": place}
                is_free = item["type"] == "custom_tool_call"
                arguments = {FREE_TEXT: item.get("input")} if is_free else item.get("arguments")
                function = {"name": item.get("name"), "arguments": arguments}
                calls.append({"id": item.get("call_id"), "function": function})
            case "function_call_output" | "custom_tool_call_output":
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
                places[f"messages.{len(messages)}.content"] = f"{place}.output"
            case "reasoning":
                reasoning += _reasoning_of(item)
                continue
            case kind if kind in _HOSTED_CALLS or (kind == "item_reference" and str(item.get("id")).startswith("rs_")):
                continue
            case "item_reference":
                remedy = "send the item itself, with store: false"
                raise refusal(place, f"refers to an item, and nothing is stored; {remedy}")
            case str() as kind if kind[1:].endswith("_call") and item.get("call_id"):  # of a tool that the client ran
                arguments = {key: item[key] for key in item if key not in ("type", "id", "call_id", "status")}
                function = {"name": kind.removesuffix("_call"), "arguments": arguments}
                message = {"role": "assistant", "tool_calls": [{"id": item["call_id"], "function": function}]}
            case str() as kind if kind[1:].endswith("_output") and item.get("call_id"):
                result = {key: item[key] for key in item if key not in ("type", "id", "call_id", "status")}
                message = {"role": "tool", "tool_call_id": item["call_id"], "content": result.get("output", result)}
            case other:
                shown = repr(other)[:MAX_NAME_CHARS]
                raise refusal(place, f"has the type {shown}, which is not supported; leave it out")
        if reasoning and message["role"] == "assistant":
            message["reasoning"] = reasoning
        reasoning = ""
        places.setdefault(f"messages.{len(messages)}", place)
        messages.append(message)
    return messages


def _reasoning_of(item: Mapping[str, Any]) -> str:
    """Text of a reasoning item; empty if another server encrypted it."""
    parts = item.get("content") or item.get("summary")
    texts: list[Any] = (
        [part.get("text") or "" for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    )
    try:
        return "\n".join(map(str, texts)) or b64decode(str(item.get("encrypted_content") or "")).decode()
    except ValueError:
        return ""


def turns_of(system: object, turns: Sequence[Mapping[str, Any]], places: dict[str, str]) -> list[dict[str, Any]]:
    """Messages of a chat with the turns of Anthropic's API, of which a user's has the results of calls.

    Args:
        places: gets the place in the body of each message and call, by its place among the messages.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if system:
        places |= {"messages.0": "system", "messages.0.content": "system"}
    for index, turn in enumerate(turns):
        pause()
        content = turn.get("content")
        message: dict[str, Any] = {"role": turn.get("role"), "content": content}
        if isinstance(content, list):
            message["content"] = parts = []
            for number, block in enumerate(content):
                pause()
                place = f"messages.{index}.content.{number}"
                match block.get("type") if isinstance(block, dict) else None:
                    case "tool_use":
                        calls = message.setdefault("tool_calls", [])
                        call = f"messages.{len(messages)}.tool_calls.{len(calls)}"
                        places |= {
                            call: place,
                            f"{call}.function": place,
                            f"{call}.function.arguments": f"{place}.input",
                        }
                        function = {"name": block.get("name"), "arguments": block.get("input")}
                        calls.append({"id": block.get("id"), "function": function})
                    case "tool_result":
                        places[f"messages.{len(messages)}"] = place
                        result = {"tool_call_id": block.get("tool_use_id"), "content": _result_of(block)}
                        messages.append({"role": "tool", **result})
                    case "redacted_thinking" | "server_tool_use" | "mcp_tool_use":  # of another server
                        pass
                    case str() as kind if kind.endswith("_tool_result"):
                        pass
                    case _:
                        parts.append(block)
            if not parts and len(message) == 2:
                continue
        places[f"messages.{len(messages)}"] = f"messages.{index}"
        messages.append(message)
    return messages


def _result_of(block: Mapping[str, Any]) -> object:
    """What a tool returned; an error says that it is one, for chats have no other sign of it."""
    content = block.get("content") or ""
    if not block.get("is_error"):
        return content
    return [{"type": "text", "text": "error:"}, *content] if isinstance(content, list) else f"error: {content}"
