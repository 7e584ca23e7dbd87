"""OpenAI's responses API: a body becomes that of a chat, and an answer a list of items or a stream of typed events.

Nothing is stored: a client sends the whole conversation each time, and ``previous_response_id`` is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, ValidationError

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError
from pdserve.router.http.json_body import refusal_of
from pdserve.router.http.schema import MAX_MESSAGES, Body, ChatBody
from pdserve.router.http.unsupported_fields import RESPONSES, RESPONSES_REASONING, check_extra_fields
from pdserve.router.http.writer import CHAR_BYTES, DELTA_BYTES
from pdserve.router.text.answer import Answer, TextDelta
from pdserve.router.text.tool_calls import CallDelta

_encode = msgspec.json.Encoder().encode
_SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "chat_template_kwargs", "cache_salt", "seed",
    "service_tier",
)  # fmt: skip
"""Fields that mean the same in a chat."""


class Reasoning(Body):
    effort: str | None = None


class ResponsesBody(Body):
    """Body of ``POST /v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[dict[str, object]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    store: bool | None = None
    """Nothing is stored, whatever it is."""
    text: dict[str, object] | None = None
    """``{"format": {...}}``: structure of the answer."""
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, object] | None = None
    cache_salt: str | None = None
    service_tier: str | None = None

    def as_chat(self) -> ChatBody:
        """The same request as a chat.

        Raises:
            ApiError: it has what this server does not support.
        """
        check_extra_fields(self.model_extra, RESPONSES)
        reasoning = self.reasoning or Reasoning()
        check_extra_fields(reasoning.model_extra, RESPONSES_REASONING, "reasoning.")
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME_FIELDS}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["reasoning_effort"] = reasoning.effort
        fields["messages"] = self._messages()
        fields["response_format"] = _response_format((self.text or {}).get("format"))
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        fields["tool_choice"] = _chat_tool(self.tool_choice) if isinstance(self.tool_choice, dict) else self.tool_choice
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            refusal = refusal_of(error)
            place = (refusal.param or "").replace("messages", "input", 1)
            raise ApiError(400, refusal.detail.replace(refusal.param or "", place, 1), param=place) from error

    def _messages(self) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise ApiError(400, "input is empty; it needs one item at least", param="input")
        for index, item in enumerate(self.input):
            match item.get("type", "message"):
                case "message":
                    messages.append({"role": item.get("role"), "content": _chat_content(item.get("content"))})
                case "function_call":
                    function = {"name": item.get("name"), "arguments": item.get("arguments")}
                    call = {"id": item.get("call_id"), "type": "function", "function": function}
                    last = messages[-1] if messages else {}
                    calls = last.setdefault("tool_calls", []) if last.get("role") == "assistant" else None
                    if isinstance(calls, list):
                        calls.append(call)
                    else:
                        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                case "function_call_output":
                    output = _chat_content(item.get("output"))
                    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
                case "reasoning":  # of an earlier answer; templates decide what the model sees again
                    pass
                case other:
                    message = f"has the type {repr(other)[:MAX_NAME_CHARS]}, which is not supported; leave it out"
                    raise ApiError(400, f"input.{index} {message}", param=f"input.{index}")
        return messages


def _chat_content(content: object) -> object:
    """Content of a message with the parts of a chat's."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


def _chat_tool(tool: Mapping[str, object]) -> dict[str, object]:
    """A tool or choice of one, whose members a chat has one level deeper."""
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": tool.get("type"), "function": function}


def _response_format(wanted: object) -> dict[str, object] | None:
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
    return wanted


def _line(event: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


class ResponseWriter:
    """Writes the answer to one request: `events` for a stream, else `add` and `whole`."""

    def __init__(self, body: ResponsesBody, answer: Answer, request_id: str, model: str) -> None:
        self._answer = answer
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
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def events(self, batch: Sequence[TextDelta]) -> bytes:
        """Events of tokens that arrived together, including those that open and end the response."""
        return b"".join(_line(event) for delta in batch for event in self._advance(delta))

    def failure(self, error: ApiError) -> bytes:
        """Event that ends a stream early."""
        code = error.code or "server_error"  # names of the API's own
        self._envelope |= {"status": "failed", "error": {"code": code, "message": error.detail}}
        return _line(self._event("response.failed", response=self._response()))

    def add(self, delta: TextDelta) -> int:
        self._advance(delta)
        return DELTA_BYTES + CHAR_BYTES * (len(delta.text) + len(delta.reasoning))

    async def whole(self) -> bytes:
        return _encode(self._response())

    def _response(self) -> dict[str, Any]:
        return {**self._envelope, "output": [*self._items]}

    def _advance(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Take the next token; return its events."""
        events: list[dict[str, Any]] = []
        if not self._num_events:
            for kind in ("created", "in_progress"):
                events.append(self._event(f"response.{kind}", response=self._response()))
        if delta.reasoning:
            events += self._continue("reasoning", delta.reasoning)
        if delta.text:
            events += self._continue("message", delta.text)
        for call in delta.calls:
            if call.id:
                events += self._open("function_call", call)
            if call.arguments:
                events += self._extend(call.arguments)
        if self._items and self._items[-1]["type"] == "reasoning":
            self._num_reasoning_tokens += len(delta.tokens)
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

    def _open(self, kind: str, call: CallDelta | None = None) -> list[dict[str, Any]]:
        events = self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._id}_{len(self._items)}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            assert call is not None
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        self._items.append(item)
        self._pieces, self._is_open = [], True
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item}))
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **self._place(), part=self._part("")))
        return events

    def _extend(self, text: str) -> list[dict[str, Any]]:
        self._pieces.append(text)
        kind = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }[self._items[-1]["type"]]
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return [self._event(f"response.{kind}.delta", **self._place(), delta=text, **more)]

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
            members = {**self._place(), "name": item["name"], "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **members))
        else:
            part = self._part(text)
            item["content"] = [part]
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
        index = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self._items) - 1, **index}

    def _finish(self, *, is_whole: bool) -> dict[str, Any]:
        status = "completed" if is_whole else "incomplete"
        num_input, num_output = len(self._answer.prompt_tokens), self._answer.num_completion_tokens
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
