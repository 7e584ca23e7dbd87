"""OpenAI's responses API: a body becomes that of a chat, and an answer a list of items or a stream of typed events.

Nothing is stored: a client sends the whole conversation each time, and ``previous_response_id`` is refused.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, PrivateAttr

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError, refusal
from pdserve.router.http.messages import FREE_TEXT, MAX_MESSAGES, messages_of
from pdserve.router.http.schema import ChatBody, ConvertedBody, ToolList
from pdserve.router.http.unsupported_fields import RESPONSES, warn_once
from pdserve.router.http.writer import DELTA_BYTES, text_bytes, typed_event
from pdserve.router.text.answer import Answer, TextDelta
from pdserve.router.text.tool_calls import whole_text

_PLACES = {
    "max_completion_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort",
    "response_format": "text.format", "response_format.json_schema": "text.format",
}  # fmt: skip
"""Field of a chat to that of a response."""
_FREE_TEXT_ONLY = {"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]}
_ITEMS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "message": ("msg", {"role": "assistant", "content": []}), "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}), "custom_tool_call": ("ctc", {"input": ""}),
}  # fmt: skip
"""Type of an item to the start of its id and its members at first."""
_CALLS = ("function_call", "custom_tool_call")
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Type of an item to what its text is called."""
_LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(ConvertedBody):
    """Body of ``POST /v1/responses``."""

    other_fields = frozenset({
        "best_of", "logprobs", "max_completion_tokens", "max_tokens", "messages", "n", "prompt_logprobs",
        "reasoning_effort", "response_format", "return_token_ids", "stream_options", "tool_choice", "tools",
        "top_logprobs",
    })  # fmt: skip
    neutral = RESPONSES

    input: Annotated[
        list[dict[str, object]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=str | list[dict[str, object]]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, object] | None = None
    """``{"format": {...}}``: structure of the answer."""
    tools: ToolList | None = None
    tool_choice: object = None
    reasoning: dict[str, object] | None = None
    """``{"effort": "..."}``; the rest changes no answer."""
    include: list[str] | None = None

    _calls: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @property
    def calls(self) -> Mapping[str, dict[str, Any]]:
        """Members of the item that a call becomes, by the name under which the tool was offered."""
        return self._calls

    def as_chat(self) -> ChatBody:
        if _LOGPROBS in (self.include or ()):
            raise refusal("include", f"has {_LOGPROBS}, which is not supported; leave it out")
        self._places |= _PLACES
        return self._chat_of(
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "max_completion_tokens": self.max_output_tokens,
                "reasoning_effort": (self.reasoning or {}).get("effort"),
                "messages": messages_of(self.instructions, self.input, self._places),
                "response_format": _response_format((self.text or {}).get("format")),
                "tools": self._chat_tools(),
                "tool_choice": self.tool_choice,
            }
        )

    def _chat_tools(self) -> list[dict[str, object]]:
        """Tools that can be offered. Those that OpenAI runs, such as ``web_search``, are not."""
        tools: list[dict[str, object]] = []
        flat = [*_flat(self.tools or (), "tools")]
        taken = {str(tool.get("name")) for _, tool, space in flat if not space}
        for place, tool, space in flat:
            kind = tool.get("type")
            if not isinstance(kind, str):
                raise refusal(place, 'should be {"type": "function", "name": "...", ...}')
            if kind not in ("function", "custom"):
                warn_once(f"tool type {kind[:MAX_NAME_CHARS]!r}", "not offered to the model")
                continue
            chat_place = f"tools.{len(tools)}"
            self._places |= {chat_place: place, f"{chat_place}.function": place}
            name = str(tool.get("name"))
            if space and (name in taken or name in self._calls):
                tool = {**tool, "name": f"{space['namespace']}.{name}"}
            kind = "custom_tool_call" if kind == "custom" else "function_call"
            self._calls[str(tool.get("name"))] = {"type": kind, "name": name, **space}
            tools.append(_chat_tool(tool))
        return tools


def _flat(
    tools: Iterable[object], place: str, space: Mapping[str, object] | None = None
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, object]]]:
    """Place of each tool, those in namespaces included, the tool, and the namespace as a member of its calls."""
    for index, each in enumerate(tools):
        tool = each if isinstance(each, dict) else {}
        if isinstance(function := tool.get("function"), dict) and "name" not in tool:  # as in chats
            tool = {**function, "type": tool.get("type")}
        inner = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(inner, list) and space is None:
            yield from _flat(inner, f"{place}.{index}.tools", {"namespace": tool.get("name")})
        else:
            yield f"{place}.{index}", tool, space or {}


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, object]:
    """A tool, whose members a chat has one level deeper."""
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    kind = tool.get("type")
    if kind != "custom":
        return {"type": kind, "function": function}
    definition = tool.get("format")
    if isinstance(definition, dict) and definition.get("definition"):
        syntax = f"{FREE_TEXT} follows this {definition.get('syntax')} grammar:\n{definition['definition']}"
        function["description"] = f"{function.get('description', '')}\n{syntax}".strip()
    return {"type": "function", "function": function | {"parameters": _FREE_TEXT_ONLY}}


def _response_format(wanted: object) -> dict[str, object] | None:
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
    return wanted


class ResponseWriter:
    """Writes the answer to one request: `events` for a stream, else `add` and `whole`."""

    def __init__(self, body: ResponsesBody, answer: Answer, request_id: str, model: str) -> None:
        self._answer = answer
        self._calls = body.calls
        self._encodes_reasoning = _REASONING in (body.include or ())
        extra = body.model_extra or {}
        self._id = request_id
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Text of the last item, which is open until the next one."""
        self._is_open = False
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._envelope: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        echoed = {
            "metadata": extra.get("metadata") or {},
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
        }
        # Written once, and refused here if it is nested too deeply, as no stream has begun
        self._envelope |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in echoed.items()}

    def events(self, batch: Sequence[TextDelta]) -> bytes:
        """Events of tokens that arrived together, including those that open and end the response."""
        return b"".join(typed_event(event) for delta in batch for event in self._advance(delta))

    def failure(self, error: ApiError) -> bytes:
        """Events that end a stream early."""
        events = self._begin()
        code = error.code or "server_error"  # names of the API's own
        self._envelope |= {"status": "failed", "error": {"code": code, "message": error.detail}}
        return b"".join(map(typed_event, [*events, self._event("response.failed", response=self._response())]))

    def add(self, delta: TextDelta) -> int:
        self._advance(delta)
        return DELTA_BYTES + text_bytes(delta)

    async def whole(self) -> bytes:
        return msgspec.json.encode(self._response())

    def _response(self) -> dict[str, Any]:
        return {**self._envelope, "output": [*self._items]}

    def _begin(self) -> list[dict[str, Any]]:
        """Events that open the response, unless it is open."""
        kinds = () if self._num_events else ("created", "in_progress")
        return [self._event(f"response.{kind}", response=self._response()) for kind in kinds]

    def _advance(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Take the next token; return its events."""
        events = self._begin()
        if delta.reasoning:
            events += self._continue("reasoning", delta.reasoning)
        if delta.text:
            events += self._continue("message", delta.text)
        for call in delta.calls:
            if call.id:
                members = self._calls.get(call.name, {"type": "function_call", "name": call.name})
                events += self._open(**members, call_id=call.id)
            if call.arguments:
                events += self._extend(call.arguments)
        if self._items and self._items[-1]["type"] == "reasoning":
            self._num_reasoning_tokens += 1
        if delta.end is not None:
            events += self._close("incomplete" if delta.end == "length" else "completed")
            events.append(self._finish(is_whole=delta.end != "length"))
        return events

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return event

    def _continue(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Add text to the open item, or to a new one of another kind."""
        is_open = self._is_open and self._items[-1]["type"] == kind
        return [*([] if is_open else self._open(kind)), *self._extend(text)]

    def _open(self, type: str, **call: str) -> list[dict[str, Any]]:
        """Begin an item, which has the members of ``call`` if it is one."""
        events = self._close("completed")
        prefix, members = _ITEMS[type]
        item_id = f"{prefix}_{self._id}_{len(self._items)}"
        item: dict[str, Any] = {"id": item_id, "type": type, "status": "in_progress", **members, **call}
        self._items.append(item)
        self._pieces, self._is_open = [], True
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item}))
        if type not in _CALLS:
            events.append(self._event("response.content_part.added", **self._place(), part=self._part("")))
        return events

    def _extend(self, text: str) -> list[dict[str, Any]]:
        self._pieces.append(text)
        if self._items[-1]["type"] == "custom_tool_call":  # its text is inside JSON, which is not complete yet
            return []
        kind = self._items[-1]["type"]
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [self._event(f"response.{_DELTAS[kind]}.delta", **self._place(), delta=text, **more)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Complete the open item, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self._items[-1], "".join(self._pieces)
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            members = {"name": item["name"], "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **self._place(), **members))
        elif item["type"] == "custom_tool_call":
            item["input"] = text = _free_text(text)
            events.append(self._event("response.custom_tool_call_input.delta", **self._place(), delta=text))
            events.append(self._event("response.custom_tool_call_input.done", **self._place(), input=text))
        else:
            part = self._part(text)
            item["content"] = [part]
            if item["type"] == "reasoning" and self._encodes_reasoning:  # for clients that keep nothing else of it
                item["encrypted_content"] = b64encode(text.encode()).decode()
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            events.append(self._event(f"response.{part['type']}.done", **self._place(), text=text, **more))
            events.append(self._event("response.content_part.done", **self._place(), part=part))
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _part(self, text: str) -> dict[str, Any]:
        if self._items[-1]["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        index = {} if item["type"] in _CALLS else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self._items) - 1, **index}

    def _finish(self, *, is_whole: bool) -> dict[str, Any]:
        status = "completed" if is_whole else "incomplete"
        num_input, num_output = len(self._answer.spec.prompt_tokens), self._answer.num_completion_tokens
        self._envelope |= {
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": self._answer.num_cached_tokens},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": num_input + num_output,
            },
        }
        return self._event(f"response.{status}", response=self._response())


def _free_text(arguments: str) -> str:
    """Text for a custom tool from the arguments of the function that it was offered as; all of them if the model did
    not write what it was asked for."""
    try:
        text = json.loads(arguments)[FREE_TEXT]
    except (KeyError, TypeError, ValueError, RecursionError):
        return arguments
    return whole_text(text) if isinstance(text, str) else arguments
