"""Streamed answers: one server-sent event per token, and one write for tokens that arrive together.

The status is sent with token 0, or with the first comment while a stream waits for it: an earlier failure is an
ordinary HTTP error. A later failure is told by events, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.router.http.anthropic import MessageWriter
from pdserve.router.http.asgi import cancel_on_disconnect
from pdserve.router.http.errors import api_error
from pdserve.router.http.exchange import Exchange
from pdserve.router.http.responses import ResponseWriter
from pdserve.router.http.writer import AnswerWriter
from pdserve.router.metrics import RouterMetrics
from pdserve.router.off_loop import off_loop
from pdserve.router.text.answer import Generation, TextDelta

Writer = AnswerWriter | ResponseWriter | MessageWriter
"""Writes the answer to one request, as a stream or whole."""


class EventStream(StreamingResponse):
    """Writes events as they arrive. A slow reader delays only this stream; one that leaves cancels it, as does one that
    stops reading, which the server disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self, exchange: Exchange, generation: Generation, writer: Writer, metrics: RouterMetrics, keep_alive_s: float
    ) -> None:
        """``keep_alive_s``: seconds between comments before token 0; 0 for none."""
        self._keep_alive_s = keep_alive_s or None
        self._generation = generation
        self._writer = writer
        self._record, self._metrics = exchange.record, metrics
        self._shows_workers = "x-show-workers" in exchange.headers
        """At the end, in a comment."""
        self._is_started = False
        self._send_part, self._parts = exchange.send, exchange.parts
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with cancel_on_disconnect(receive):
                # A task of its own: for each token, every await that is pending is resumed
                await asyncio.create_task(self._write_all(send))
        except ClientDisconnect:
            if not self._is_started:
                raise
            # An unfinished answer makes the server close the connection

    async def _write_all(self, send: Send) -> None:
        answers, last = self._generation.answers, b""
        has_echo = any(answer.echo is not None for answer in answers)
        try:
            with self._generation as generation:
                batch = await self._first(send)
                await self._start(send)
                while batch:
                    if has_echo:
                        num_echoed = sum(delta.num_echoed for delta in batch)
                        data = await off_loop(num_echoed, partial(self._writer.events, batch))
                    else:
                        data = self._writer.events(batch)
                    await self._write(data)
                    self._count(batch)
                    batch = await generation.next(None if has_echo else self._write_now)
            self._metrics.answered(self._record)
            if self._shows_workers:
                workers = " ".join(worker for answer in answers for worker in answer.workers)
                last = f": workers {workers}\n\n".encode()
        except Exception as error:
            if not self._is_started:
                raise
            last = self._writer.failure(api_error(error))
        await self._write(last, more_body=False)

    async def _first(self, send: Send) -> list[TextDelta]:
        """Write comments until token 0 arrives; return what came with it."""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await self._generation.next()
            except TimeoutError:
                await self._start(send)
                await self._write(b": waiting\n\n")

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_started = True

    async def _write(self, body: bytes, *, more_body: bool = True) -> None:
        since_s = time.monotonic()
        await self._send_part({"type": "http.response.body", "body": body, "more_body": more_body})
        self._record.wrote(time.monotonic() - since_s)

    def _write_now(self, batch: Sequence[TextDelta]) -> bool:
        """Write text unless the client reads so slowly that its connection is full."""
        if self._parts is None or not self._parts.is_ready:
            return False
        self._parts.write(self._writer.events(batch))
        self._count(batch)
        return True

    def _count(self, batch: Sequence[TextDelta]) -> None:
        for delta in batch:
            self._metrics.token(self._record, delta.choice)
