"""JSON of a request's answers in OpenAI's two APIs, whole or as server-sent events.

The shared members of a stream's chunks are encoded once, so a token costs only the encoding of its own text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

import msgspec

from pdserve.contracts.step import TokenLogprobs
from pdserve.router.http.errors import ApiError
from pdserve.router.http.schema import ChatBody, GenerationBody
from pdserve.router.off_loop import off_loop
from pdserve.router.text.answer import Answer, AnswerEnd, AnswerToken, TextDelta, usage
from pdserve.router.text.tokenizer import ChatTokenizer
from pdserve.router.text.tool_calls import CallDelta

VERSION = version("pdserve")

DONE = b"data: [DONE]\n\n"

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks; the same value as in vLLM."""

DELTA_BYTES = 128
"""Memory of an object that holds a piece of a whole answer."""
TEXT_BYTES = 8
"""Of each byte of text (UTF-8), its copies and the answer's JSON included."""

_encode = msgspec.json.Encoder().encode


def typed_event(members: Mapping[str, Any]) -> bytes:
    """Event of an API whose events have a type."""
    return b"event: %b\ndata: %b\n\n" % (members["type"].encode(), _encode(members))


class AnswerWriter:
    """Writes the answers to one request: `events` for a stream, else `add` and `whole`."""

    def __init__(
        self, tokenizer: ChatTokenizer, body: GenerationBody, answers: Sequence[Answer], request_id: str, model: str
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._answers = answers
        self._is_chat = isinstance(body, ChatBody)
        self._has_usage_everywhere, self._shows_tokens = body.has_usage_everywhere, body.shows_tokens
        prefix, kind = ("chatcmpl-", "chat.completion") if self._is_chat else ("cmpl-", "text_completion")
        self._envelope = {
            "id": prefix + request_id,
            "object": f"{kind}.chunk" if self._is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"pdserve-{VERSION}",
        }
        # Streams
        self._head = b"data: " + _encode(self._envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if body.has_usage_chunk else b"]}\n\n"
        before, after = (b'"delta":{"content":', b"}") if self._is_chat else (b'"text":', b"")
        num_streamed = body.num_answers if body.stream else 0
        self._before_text = [self._head + b'{"index":%d,' % index + before for index in range(num_streamed)]
        self._after_text = after + b',"logprobs":null,"finish_reason":null}'
        self._after_token_text = after + b',"logprobs":%b,"finish_reason":null%b}'
        self._unopened = set(range(body.num_answers)) if self._is_chat else set()
        """Choices whose role has not been written."""
        self._num_running = body.num_answers
        # Whole answers, by choice
        self._texts = [bytearray() for _ in range(body.num_answers)]
        self._reasoning: dict[int, bytearray] = {}
        self._calls: dict[int, list[CallDelta]] = {}
        self._lists: list[dict[str, bytearray]] = [{} for _ in range(body.num_answers)]
        """JSON of what lists each token, by name, without the bracket at its end."""
        self._num_listed = 0
        self._ends: list[AnswerEnd | None] = [None] * body.num_answers

    # Streams

    def events(self, batch: Sequence[TextDelta]) -> bytes:
        """Events of tokens that arrived together, including those that open and end choices and the stream."""
        return b"".join(map(self._events, batch))

    def failure(self, error: ApiError) -> bytes:
        """Event that ends a stream early: an OpenAI error object."""
        return b"data: %b\n\n" % error.body("")

    def _events(self, delta: TextDelta) -> bytes:
        data = b""
        if delta.choice in self._unopened:
            self._unopened.remove(delta.choice)
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            data = self._chunk(b'{"index":%d,%b' % (delta.choice, role))
        if delta.reasoning:
            data += self._delta_chunk(delta.choice, _reasoning(delta.reasoning))
        if self._shows_tokens:
            data += self._text_chunk(delta, self._after_token_text % self._shown(delta))
        elif delta.text or (delta.end is None and not delta.reasoning and not delta.calls):
            data += self._text_chunk(delta, self._after_text)
        for call in delta.calls:
            data += self._delta_chunk(delta.choice, {"tool_calls": [_call_delta(call)]})
        return data if delta.end is None else data + self._ending(delta.choice, delta.end)

    def _delta_chunk(self, choice: int, delta: dict[str, Any]) -> bytes:
        return self._chunk(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (choice, _encode(delta)))

    def _text_chunk(self, delta: TextDelta, after: bytes) -> bytes:
        tail = self._usage_tail() if self._has_usage_everywhere else self._tail
        return self._before_text[delta.choice] + _encode(delta.text) + after + tail

    def _shown(self, delta: TextDelta) -> tuple[bytes, bytes]:
        ids = b',"token_ids":%b' % _encode(_token_ids(delta)) if self._body.return_token_ids else b""
        return _encode(self._logprobs(delta.tokens)), ids

    def _ending(self, choice: int, end: AnswerEnd) -> bytes:
        text = b'"delta":{}' if self._is_chat else b'"text":""'
        data = self._chunk(b'{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}' % (choice, text, end.encode()))
        self._num_running -= 1
        if self._num_running:
            return data
        if self._body.has_usage_chunk:
            data += self._head + self._usage_tail()
        return data + DONE

    def _chunk(self, choice: bytes) -> bytes:
        return self._head + choice + (self._usage_tail() if self._has_usage_everywhere else self._tail)

    def _usage_tail(self) -> bytes:
        return b'],"usage":%b}\n\n' % _encode(usage(self._answers))

    # Whole answers

    def add(self, delta: TextDelta) -> int:
        """Keep a token; return the bytes of memory that it takes to the end. What lists tokens is kept as JSON, a small
        part of the objects that it is made of."""
        choice = delta.choice
        self._texts[choice] += delta.text.encode()
        if delta.reasoning:
            self._reasoning.setdefault(choice, bytearray()).extend(delta.reasoning.encode())
        if delta.calls:
            self._calls.setdefault(choice, []).extend(delta.calls)
        self._ends[choice] = delta.end
        num_bytes = text_bytes(delta)
        if self._shows_tokens:
            lists = self._logprobs(delta.tokens) or {}
            if self._body.return_token_ids:
                lists["token_ids"] = _token_ids(delta)
            for name, values in lists.items():
                if values:
                    kept = self._lists[choice].setdefault(name, bytearray())
                    data = _encode(values)[1:-1]
                    kept += b",%b" % data if kept else b"[%b" % data
                    num_bytes += 4 * len(data)  # the answer is another copy, and its buffer grows in steps
            self._num_listed += len(delta.tokens)
        return num_bytes

    async def whole(self) -> bytes:
        num_prompt_logprobs = sum(len(answer.prompt_logprobs) for answer in self._answers)
        return await off_loop(self._num_listed + num_prompt_logprobs * self._body.num_choices, self._whole)

    def _whole(self) -> bytes:
        choices = [self._choice(index) for index in range(self._body.num_answers)]
        members = [self._prompt_members(answer) for answer in self._answers]
        if not self._is_chat:
            choices = [choice | members[index // self._body.num_choices] for index, choice in enumerate(choices)]
        last = members[0] if self._is_chat else {}
        return _encode(self._envelope | {"choices": choices, "usage": usage(self._answers)} | last)

    def _list(self, choice: int, name: str) -> msgspec.Raw:
        kept = self._lists[choice].setdefault(name, bytearray(b"["))
        kept += b"]"
        return msgspec.Raw(kept)

    def _choice(self, index: int) -> dict[str, Any]:
        text = self._texts[index].decode()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if index in self._reasoning:
            message |= _reasoning(self._reasoning[index].decode())
        if index in self._calls:
            message |= {"content": text or None, "tool_calls": _whole_calls(self._calls[index])}
        logprobs = self._logprobs(())
        choice: dict[str, Any] = {
            "index": index,
            **({"message": message} if self._is_chat else {"text": text}),
            "logprobs": logprobs
            and {name: None if values is None else self._list(index, name) for name, values in logprobs.items()},
            "finish_reason": self._ends[index],
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._list(index, "token_ids")
        return choice

    def _prompt_members(self, answer: Answer) -> dict[str, Any]:
        members: dict[str, Any] = {"prompt_token_ids": answer.spec.prompt_tokens} if self._body.return_token_ids else {}
        if self._body.prompt_logprobs is not None:
            entries = prompt_logprobs(
                self._tokenizer, answer.spec.prompt_tokens, answer.prompt_logprobs, self._body.prompt_logprobs
            )
            members["prompt_logprobs"] = msgspec.Raw(b"[%b]" % b",".join(map(_encode, entries)))
        return members

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self._body.num_logprobs < 0:
            return None
        if self._is_chat:
            return chat_logprobs(self._tokenizer, tokens)
        return completion_logprobs(self._tokenizer, tokens, self._body.num_logprobs)


def text_bytes(delta: TextDelta) -> int:
    """Memory that the parts of a token's text take to the end of a whole answer."""
    call_bytes = sum(2 * DELTA_BYTES + TEXT_BYTES * len(call.arguments) for call in delta.calls)
    return TEXT_BYTES * len((delta.text + delta.reasoning).encode()) + call_bytes


def _token_ids(delta: TextDelta) -> list[int]:
    return [token.token for token in delta.tokens[delta.num_echoed :]]


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """Part of a call, as a stream has it."""
    if not call.id:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, Any]:
    """Reasoning under both of the names that clients read: DeepSeek's, and that of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


def _whole_calls(parts: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls = []
    for _, group in groupby(parts, key=lambda part: part.number):
        first, *rest = group
        function = {"name": first.name, "arguments": "".join(part.arguments for part in (first, *rest))}
        calls.append({"id": first.id, "type": "function", "function": function})
    return calls


def chat_logprobs(tokenizer: ChatTokenizer, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice: one entry per token."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token)
        return {"token": content.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(content)}

    entries = [
        {**described(token, logprobs.logprob), "top_logprobs": [described(*other) for other in logprobs.top]}
        for token, logprobs, _ in tokens
        if logprobs is not None
    ]
    return {"content": entries, "refusal": None}


def completion_logprobs(
    tokenizer: ChatTokenizer, tokens: Sequence[AnswerToken], num_alternatives: int
) -> dict[str, list[Any]]:
    """``logprobs`` of a text completion's choice: columns, with null where nothing precedes a token."""

    def alternatives(token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        pairs = [*logprobs.top[:num_alternatives], (token, logprobs.logprob)]
        return {tokenizer.token_text(other): max(logprob, _LOWEST) for other, logprob in pairs}

    return {
        "tokens": [tokenizer.token_text(token) for token, _, _ in tokens],
        "token_logprobs": [None if logprobs is None else max(logprobs.logprob, _LOWEST) for _, logprobs, _ in tokens],
        "top_logprobs": [None if logprobs is None else alternatives(token, logprobs) for token, logprobs, _ in tokens],
        "text_offset": [offset_chars for _, _, offset_chars in tokens],
    }


def prompt_logprobs(
    tokenizer: ChatTokenizer, prompt_tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], num_alternatives: int
) -> Iterator[dict[str, Any] | None]:
    """``prompt_logprobs``: entries by token id for every prompt token, null for the first. The rank of a prompt token
    outside the alternatives is null."""

    def entry(token: int, at_token: TokenLogprobs) -> dict[str, Any]:
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(at_token.top[:num_alternatives], 1)}
        return {
            str(other): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(other)}
            for other, (rank, logprob) in ({token: (None, at_token.logprob)} | ranked).items()
        }

    yield None
    for token, at_token in zip(prompt_tokens[1:], logprobs, strict=True):
        yield entry(token, at_token)
