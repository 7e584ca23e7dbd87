"""Answers a request with a stream of server-sent events: one per token, and one write for tokens that come together.

The status is sent with token 0: what fails before that is an ordinary HTTP error. What fails later is one event with an
OpenAI error object, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.router.disconnect import cancel_on_disconnect
from pdserve.router.errors import api_error
from pdserve.router.token_timer import TokenTimer


class TokenEvents(NamedTuple):
    """What is written at once."""

    choices: Sequence[int]
    """Of each token, the index of its choice."""
    data: bytes


DONE = b"data: [DONE]\n\n"

WRITE_TIMEOUT_S = 60.0
"""A reader that takes nothing for this long while an event waits for it counts as one that has left."""


def event(data: bytes) -> bytes:
    """An event that carries one line of JSON."""
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Writes events as they come. A slow reader holds up this stream alone; one that leaves, or reads no more,
    cancels it."""

    media_type = "text/event-stream"

    def __init__(self, tokens: AsyncGenerator[TokenEvents, None], timer: TokenTimer) -> None:
        """``tokens`` yields the events of the tokens, those of the stream's beginning and end included."""
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
        """Until a write has waited too long. A look from time to time costs less than a deadline for each write."""
        while True:
            await asyncio.sleep(WRITE_TIMEOUT_S / 4)
            if self._writing_since_s is not None and time.monotonic() - self._writing_since_s > WRITE_TIMEOUT_S:
                return
