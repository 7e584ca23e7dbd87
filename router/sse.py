"""Answers a request with a stream of server-sent events, one write per token.

The status is sent with token 0: what fails before that is an ordinary HTTP error. What fails later is one event with an
OpenAI error object, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.router.disconnect import cancel_on_disconnect
from pdserve.router.errors import api_error
from pdserve.router.token_timer import TokenTimer


class TokenEvents(NamedTuple):
    """What is written for one token."""

    choice: int
    """Index of its choice."""
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
        """``tokens`` yields the events of one token at a time, those of the stream's beginning and end included."""
        self._tokens = tokens
        self._timer = timer
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        try:
            async with cancel_on_disconnect(receive), aclosing(self._tokens) as tokens:
                async for choice, data in tokens:
                    if not is_started:
                        is_started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _write(send, data)
                    self._timer.token(choice)
            self._timer.finished()
        except ClientDisconnect:
            if not is_started:
                raise
            return  # an unfinished answer makes the server close the connection
        except Exception as error:
            if not is_started:
                raise
            await _write(send, event(api_error(error).body()))
        await _write(send, b"", more_body=False)


async def _write(send: Send, body: bytes, *, more_body: bool = True) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
    except TimeoutError:
        raise ClientDisconnect from None
