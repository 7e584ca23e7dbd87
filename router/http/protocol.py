"""Uvicorn's HTTP/1.1 protocol with limits on everything outside a request's body.

Without them, a client could send headers for ever, before or after the body, and have all of them buffered, or send
none and keep the connection.

`pdserve.router.main` configures uvicorn to create one per connection. `pdserve.router.http.asgi` bounds the body.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Limit for request line and headers, h11's default. Also limits the bytes between and after the parts of a body: chunk
framing and trailers."""

HEAD_TIMEOUT_S = 30.0
"""Seconds from the first byte of a request, or from the connection for its first one, to the end of its headers."""


MAX_CONNECTIONS = 4096
"""Open at once; others are closed as they come."""


class BoundedHttpProtocol(HttpToolsProtocol):
    _head_deadline: asyncio.TimerHandle | None = None
    """Set while a head is awaited."""
    _num_steps = 0
    """Number of times that a head began or was complete, or part of a body arrived."""
    _num_bare_bytes = 0
    """Bytes received since the last such step."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            self.transport = transport  # which `connection_lost` closes
            transport.abort()
            return
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._num_steps += 1
        self._forget_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_steps += 1
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        num_steps = self._num_steps
        super().data_received(data)
        self._num_bare_bytes = self._num_bare_bytes + len(data) if self._num_steps == num_steps else 0
        if self._num_bare_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _refuse(self) -> None:
        if self._head_deadline is None:  # the request is being answered
            self.transport.close()
        else:
            self._forget_head()
            self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")

    def _await_head(self) -> None:
        self._num_steps += 1
        self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
