"""Streamed answers: one server-sent event per token, and one write for tokens that arrive together.

The shared members of a stream's chunks are encoded once, so a token costs only the encoding of its own text. The status
is sent with token 0: an earlier failure is an ordinary HTTP error. A later failure is one event with an OpenAI error
object, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.router.http.asgi import cancel_on_disconnect
from pdserve.router.http.errors import api_error
from pdserve.router.http.format import AnswerFormat, off_loop
from pdserve.router.http.schema import GenerationBody
from pdserve.router.metrics import TokenTimer
from pdserve.router.text.answer import Answers, TextDelta, Usage


class TokenEvents(NamedTuple):
    """Events of one write."""

    choices: Sequence[int]
    """Index of each token's choice."""
    data: bytes


DONE = b"data: [DONE]\n\n"

WRITE_TIMEOUT_S = 60.0
"""Seconds without progress while an event waits, after which the reader counts as gone."""


def event(data: bytes) -> bytes:
    """Event that carries one line of JSON."""
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Writes events as they arrive. A slow reader delays only this stream; one that leaves, or stops reading, cancels
    it."""

    media_type = "text/event-stream"

    def __init__(self, tokens: AsyncGenerator[TokenEvents, None], timer: TokenTimer) -> None:
        """``tokens`` yields the events of the tokens, including those that open and end the stream."""
        self._tokens = tokens
        self._timer = timer
        self._is_started = False
        self._writing_since_s: float | None = None
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with cancel_on_disconnect(receive, self._stall):
                await self._write_all(send)
        except ClientDisconnect:
            if not self._is_started:
                raise
            # An unfinished answer makes the server close the connection

    async def _write_all(self, send: Send) -> None:
        last = b""
        try:
            async with aclosing(self._tokens) as tokens:
                async for choices, data in tokens:
                    if not self._is_started:
                        self._is_started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._write(send, data)
                    for choice in choices:
                        self._timer.token(choice)
            self._timer.finished()
        except Exception as error:
            if not self._is_started:
                raise
            last = event(api_error(error).body())
        await self._write(send, last, more_body=False)

    async def _write(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        self._writing_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._writing_since_s = None

    async def _stall(self) -> None:
        """Return once a write has waited too long. Periodic polling costs less than a deadline for each write."""
        while True:
            await asyncio.sleep(WRITE_TIMEOUT_S / 4)
            if self._writing_since_s is not None and time.monotonic() - self._writing_since_s > WRITE_TIMEOUT_S:
                return


_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the answers of one stream."""

    def __init__(
        self, envelope: dict[str, object], body: GenerationBody, answers: Answers, format: AnswerFormat
    ) -> None:
        """``envelope``: members shared by all chunks."""
        self._head = _encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if body.has_usage_chunk else b"]}"
        self._has_usage_chunk = body.has_usage_chunk
        self._has_usage_everywhere = body.has_usage_everywhere
        self._shows_prompt = body.shows_prompt
        self._answers = answers
        self._format = format
        self._unopened = set(range(body.num_answers))
        self._num_running = body.num_answers

    async def events(self) -> AsyncGenerator[TokenEvents, None]:
        """Yield the events of tokens as they arrive; opening and ending events come with the first and the last token.

        Raises:
            GenerationError: no token follows.
        """
        async with aclosing(self._answers.deltas()) as deltas:
            async for together in deltas:
                yield TokenEvents([delta.choice for delta in together], await self._data(together))

    async def _data(self, together: Sequence[TextDelta]) -> bytes:
        num_echoed = sum(len(delta.echoed) for delta in together) if self._shows_prompt else 0
        return await off_loop(num_echoed, lambda: b"".join(map(self._token, together)))

    def _token(self, delta: TextDelta) -> bytes:
        data = self._opening(delta.choice) if delta.choice in self._unopened else b""
        if delta.end is None or delta.text or self._format.shows_tokens:
            data += self._chunk(self._format.delta(delta))
        if delta.end is not None:
            data += self._ending(delta)
        return data

    def _opening(self, index: int) -> bytes:
        self._unopened.remove(index)
        opening = self._format.opening(index)
        return self._chunk(opening) if opening else b""

    def _ending(self, delta: TextDelta) -> bytes:
        assert delta.end is not None
        data = self._chunk(self._format.ending(delta.choice, delta.end))
        self._num_running -= 1
        if self._num_running:
            return data
        if self._has_usage_chunk:
            data += event(self._head + _usage_tail(self._answers.usage))
        return data + DONE

    def _chunk(self, choice: bytes) -> bytes:
        tail = _usage_tail(self._answers.usage) if self._has_usage_everywhere else self._tail
        return event(self._head + choice + tail)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage.as_dict()) + b"}"
