"""Streamed answers: one server-sent event per token, and one write for tokens that arrive together.

The status is sent with token 0, or after 10 s without one: an earlier failure is an ordinary HTTP error. A later
failure is one event with an OpenAI error object, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.router.http.asgi import cancel_on_disconnect
from pdserve.router.http.errors import api_error
from pdserve.router.http.token_timer import TokenTimer
from pdserve.router.http.writer import event
from pdserve.router.text.answer import Answer, TextDelta, deltas_of

WRITE_TIMEOUT_S = 60.0
"""Seconds without progress while an event waits, after which the reader counts as gone."""


WAITING_S = 10.0
"""Seconds between comments before token 0, so that proxies do not cut the connection."""


class EventWriter(Protocol):
    async def events(self, batch: Sequence[TextDelta]) -> bytes:
        """Events of tokens that arrived together, including those that open and end the stream."""
        ...


class EventStream(StreamingResponse):
    """Writes events as they arrive. A slow reader delays only this stream; one that leaves, or stops reading, cancels
    it."""

    media_type = "text/event-stream"

    def __init__(
        self, answers: Sequence[Answer], writer: EventWriter, timer: TokenTimer, *, shows_workers: bool = False
    ) -> None:
        """``shows_workers``: end with a comment that names the workers."""
        self._answers = answers
        self._writer = writer
        self._timer = timer
        self._shows_workers = shows_workers
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
        waiting = asyncio.create_task(self._wait(send))
        try:
            async with aclosing(deltas_of(self._answers)) as deltas:
                async for batch in deltas:
                    data = await self._writer.events(batch)
                    if not waiting.done():
                        await _end(waiting)
                        await self._start(send)
                    await self._write(send, data)
                    for delta in batch:
                        self._timer.token(delta.choice)
            self._timer.finished([answer.journey for answer in self._answers])
            if self._shows_workers:
                workers = " ".join(worker for answer in self._answers for worker in answer.journey.workers)
                last = f": workers {workers}\n\n".encode()
        except Exception as error:
            await _end(waiting)
            if not self._is_started:
                raise
            last = event(api_error(error).body())
        finally:
            waiting.cancel()
        await self._write(send, last, more_body=False)

    async def _wait(self, send: Send) -> None:
        """Write comments until token 0 arrives."""
        while True:
            await asyncio.sleep(WAITING_S)
            await self._start(send)
            await self._write(send, b": waiting\n\n")

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_started = True

    async def _write(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        self._writing_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._timer.wrote(time.monotonic() - self._writing_since_s)
        self._writing_since_s = None

    async def _stall(self) -> None:
        """Return once a write has waited too long. Periodic polling costs less than a deadline for each write."""
        while True:
            await asyncio.sleep(WRITE_TIMEOUT_S / 4)
            if self._writing_since_s is not None and time.monotonic() - self._writing_since_s > WRITE_TIMEOUT_S:
                return


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
