"""Anthropic's Messages API: a body becomes that of a chat, and an answer a list of blocks or a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from pdserve.router.http.errors import MAX_NAME_CHARS, MESSAGES_PATH, ApiError, refusal
from pdserve.router.http.messages import MAX_MESSAGES, call_arguments, turns_of
from pdserve.router.http.schema import ChatBody, ConvertedBody, ToolList
from pdserve.router.http.unsupported_fields import MESSAGES, warn_once
from pdserve.router.http.writer import DELTA_BYTES, text_bytes, typed_event
from pdserve.router.text.answer import Answer, TextDelta

_PLACES = {
    "reasoning_effort": "output_config.effort", "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format", "stop": "stop_sequences",
}  # fmt: skip
"""Field of a chat to that of a message."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Type of a ``tool_choice`` to that of a chat."""
_EFFORTS = {"disabled": "none", "enabled": "medium"}
"""Type of ``thinking`` to the effort of requests that name none."""
_SIGNATURE = "unsigned"
"""Of thinking: some clients send none back that has no signature."""
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class _Chat(ChatBody):
    # Claude Code asks for what Anthropic's models can answer, and a stop reason of this API tells of a full context;
    # OpenAI's and vLLM's chats refuse such a limit
    may_fill_context = True


class MessagesBody(ConvertedBody):
    """Body of ``POST /v1/messages`` and of ``/v1/messages/count_tokens``."""

    chat_model = _Chat
    other_fields = frozenset({"best_of", "logprobs", "n", "prompt_logprobs", "return_token_ids", "stream_options"})
    neutral = MESSAGES

    messages: Annotated[list[dict[str, object]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: object = None
    """Checked as the content of a message."""
    tools: ToolList | None = None
    tool_choice: dict[str, object] | None = None
    stop_sequences: object = None
    thinking: dict[str, object] | None = None
    """``disabled`` turns it off where the template can; a budget or a display of it changes nothing."""
    output_config: dict[str, object] | None = None
    """``effort``, and the ``format`` of the answer."""

    def as_chat(self) -> ChatBody:
        output, choice, thinking = self.output_config or {}, self.tool_choice or {}, self.thinking or {}
        wanted = output.get("format")
        if isinstance(wanted, dict):
            wanted = {"type": wanted.get("type"), "json_schema": wanted}
        self._places |= _PLACES
        messages = turns_of(self.system, self.messages, self._places)
        begins_answer = messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        converted = {
            "messages": messages,
            "tools": self._chat_tools(),
            "tool_choice": _chat_choice(choice),
            "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
            "stop": self.stop_sequences,
            "reasoning_effort": output.get("effort") or _EFFORTS.get(str(thinking.get("type"))),
            "response_format": wanted,
            "continue_final_message": True if begins_answer else None,
        }
        return self._chat_of({name: value for name, value in converted.items() if value is not None})

    def _chat_tools(self) -> list[dict[str, object]]:
        """Tools that can be offered. Those that Anthropic defines or runs, such as its web search, are not."""
        tools: list[dict[str, object]] = []
        for index, tool in enumerate(self.tools or ()):
            kind = tool.get("type") or "custom"
            if kind == "function":  # nobody's tool
                raise refusal(f"tools.{index}", 'should be {"name": "...", "input_schema": {...}}')
            if kind != "custom":
                warn_once(f"tool type {str(kind)[:MAX_NAME_CHARS]!r}", "not offered to the model")
                continue
            place = f"tools.{len(tools)}.function"
            self._places |= {place: f"tools.{index}", f"{place}.parameters": f"tools.{index}.input_schema"}
            function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
            tools.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
        return tools


def _chat_choice(choice: Mapping[str, object]) -> object:
    match choice.get("type", "auto"):
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case str() as kind if kind in _CHOICES:
            return _CHOICES[kind]
    raise refusal("tool_choice", 'should be {"type": ...} of the type auto, any, tool or none')


def _event(kind: str, **members: object) -> bytes:
    return typed_event({"type": kind, **members})


class MessageWriter:
    """Writes the answer to one request: `events` for a stream, else `add` and `whole`."""

    def __init__(self, answer: Answer, max_tokens: int | None, request_id: str, model: str) -> None:
        """``max_tokens``: as the request has it."""
        self._answer = answer
        self._max_tokens = max_tokens
        self._message: dict[str, object] = {
            "id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []
        """Of a whole answer, with their texts."""
        self._kind = ""
        """Of the open block."""
        self._index = -1
        """Of the open block."""
        self._is_begun = False

    def events(self, batch: Sequence[TextDelta]) -> bytes:
        """Events of tokens that arrived together, including those that open and end the message."""
        return b"".join([event for delta in batch for event in self._events(delta)])

    def failure(self, error: ApiError) -> bytes:
        """Event that ends a stream early."""
        return b"event: error\ndata: %b\n\n" % error.body(MESSAGES_PATH)

    def add(self, delta: TextDelta) -> int:
        for block, text in self._pieces(delta):
            if block is not None:
                self._blocks.append((block, []))
            self._blocks[-1][1].append(text)
        if delta.end is not None:
            self._message |= self._end(delta)
        return DELTA_BYTES + text_bytes(delta)

    async def whole(self) -> bytes:
        content = list[dict[str, Any]]()
        for block, texts in self._blocks:
            kind, text = block["type"], "".join(texts)
            content.append(block | ({"input": call_arguments(text)} if kind == "tool_use" else {kind: text}))
            if kind == "thinking":
                content[-1]["signature"] = _SIGNATURE
        return msgspec.json.encode(self._message | {"content": content, "usage": self._usage()})

    def _events(self, delta: TextDelta) -> Iterator[bytes]:
        if not self._is_begun:
            self._is_begun = True
            yield _event("message_start", message=self._message | {"usage": self._usage() | {"output_tokens": 0}})
            yield _event("ping")
        last = self._kind
        for block, text in self._pieces(delta):
            if block is not None:
                yield from self._close(last)
                self._index += 1
                last = self._kind
                yield _event("content_block_start", index=self._index, content_block=block)
            if text:
                yield self._delta("input_json" if last == "tool_use" else last, text)
        if delta.end is not None:
            yield from self._close(last)
            yield _event("message_delta", delta=self._end(delta), usage=self._usage())
            yield _event("message_stop")

    def _pieces(self, delta: TextDelta) -> Iterator[tuple[dict[str, Any] | None, str]]:
        """Texts of a token, each with the block that it begins, if it begins one."""
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                is_new, self._kind = self._kind != kind, kind
                more = {"signature": ""} if kind == "thinking" else {}
                yield {"type": kind, kind: "", **more} if is_new else None, text
        for call in delta.calls:
            self._kind = "tool_use"
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield block if call.id else None, call.arguments

    def _delta(self, kind: str, text: str) -> bytes:
        delta = {"type": f"{kind}_delta", "partial_json" if kind == "input_json" else kind: text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self, kind: str) -> Iterator[bytes]:
        """End the open block, if any."""
        if kind == "thinking":
            yield self._delta("signature", _SIGNATURE)
        if kind:
            yield _event("content_block_stop", index=self._index)

    def _end(self, delta: TextDelta) -> dict[str, object]:
        assert delta.end is not None
        reason = "stop_sequence" if delta.stop_string else _STOP_REASONS[delta.end]
        if reason == "max_tokens" and self._answer.num_completion_tokens < (self._max_tokens or 0):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": delta.stop_string or None}

    def _usage(self) -> dict[str, object]:
        """Input tokens are those that no cache had."""
        num_cached = self._answer.num_cached_tokens
        return {
            "input_tokens": len(self._answer.spec.prompt_tokens) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._answer.num_completion_tokens,
        }
