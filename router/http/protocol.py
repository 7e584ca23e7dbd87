"""Uvicorn's HTTP/1.1 protocol with limits on everything outside a request's body.

Without them, a client could send headers for ever, before or after the body, and have all of them buffered, or send
none and keep the connection. Offers of another protocol are ignored, a client that has sent its request may close its
sending half, and one of HTTP/1.0 gets no chunks.

`pdserve.router.main` configures uvicorn to create one per connection. `pdserve.router.http.json_body` bounds the body.
"""

from __future__ import annotations

import asyncio
import socket

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 2**10
"""Limit for request line and headers, h11's default. Also limits the bytes between and after the parts of a body: chunk
framing and trailers."""

HEAD_TIMEOUT_S = 30.0
"""Seconds from the first byte of a request, or from the connection for its first one, to the end of its headers."""

WRITE_TIMEOUT_S = 60.0
"""Seconds without progress while a client does not read what waits for it, after which it counts as gone; it may take
twice that to be noticed."""

LEFT_POLL_S = 0.1
"""Seconds between looks at a connection whose client sends no more."""
LOOKS_PER_SIGN = 100

MAX_CONNECTIONS = 4096
"""Open at once, unless uvicorn's ``limit_concurrency`` says otherwise. The requests of some more are refused."""
MAX_REFUSED = 256
"""Connections whose requests are refused; others are closed as they come."""


class BoundedHttpProtocol(HttpToolsProtocol):
    _head_deadline: asyncio.TimerHandle | None = None
    """Set while a head is awaited."""
    _num_steps = 0
    """Number of times that a head began or was complete, or part of a body arrived."""
    _num_bare_bytes = 0
    """Bytes received since the last such step."""
    _reader_check: asyncio.TimerHandle | None = None
    """Set while a client has something to read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        num_beyond = len(self.connections) - (self.config.limit_concurrency or MAX_CONNECTIONS)
        if num_beyond >= MAX_REFUSED:
            self.transport = transport  # which `connection_lost` closes
            transport.abort()
            return
        self.limit_concurrency = None  # uvicorn would refuse the requests of earlier connections, too
        self.app_state = {**self.app_state, "is_beyond_limit": num_beyond >= 0}
        super().connection_made(transport)
        self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._num_steps += 1
        if self.parser.should_upgrade():
            return  # `_parse` reads the head again
        self._forget_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _end_with_connection(self.cycle)
        else:
            self.scope["state"]["parts"] = PartWriter(self.cycle)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._num_steps += 1
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        num_steps = self._num_steps
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self.send_400_response(f"This port takes HTTP/1.1 by {self.scheme}://, and this is not: {error}.")
        self._num_bare_bytes = self._num_bare_bytes + len(data) if self._num_steps == num_steps else 0
        if self._num_bare_bytes > MAX_HEAD_BYTES:
            self._refuse()

    def _parse(self, data: memoryview) -> None:
        """Parse what arrived. Offers of another protocol, such as h2c of Java's clients, are ignored (RFC 9110, 7.8):
        the parser takes all after the head for that protocol, so a new one gets it behind a head without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("It is no proxy") from None
                headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
                data = data[offer.args[0] :]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to answer on: a client that has sent a whole request may have closed just its sending half. One that
        has left resets the connection once anything reaches it. HTTP/1.0 has no interim responses, and TLS no halves.
        """
        is_answering = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not is_answering or self.scheme == "https" or self.cycle.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(LEFT_POLL_S, self._watch)
        return True

    def _watch(self, num_looks: int = 0) -> None:
        """Close a connection that has been reset, which nobody else notices before the next write; write what a client
        ignores, so that one that has left resets it."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if num_looks % LOOKS_PER_SIGN == 0 and not self.pipeline:
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self.cycle.chunked_encoding and not self.cycle.response_complete:  # events, which take comments
                self.transport.write(b"3\r\n:\n\n\r\n")
        self.loop.call_later(LEFT_POLL_S, self._watch, num_looks + 1)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader()

    def _await_reader(self) -> None:
        if self._reader_check is None and (num_left := self.transport.get_write_buffer_size()):
            self._reader_check = self.loop.call_later(WRITE_TIMEOUT_S, self._check_reader, num_left)

    def _check_reader(self, num_before: int) -> None:
        """Abort a connection of which nothing was read. To close it would wait for the client."""
        self._reader_check = None
        if self.transport.get_write_buffer_size() == num_before:
            self.transport.abort()
        else:
            self._await_reader()

    def _forget_reader(self) -> None:
        if self._reader_check is not None:
            self._reader_check.cancel()
            self._reader_check = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_reader()
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


class PartWriter:
    """Writes chunks of a response at once, where uvicorn's ``send`` needs a task that may wait for a slow client."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """Whether nothing waits for the client."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, body: bytes) -> None:
        """Requires `is_ready`, and that the response has begun and more follows."""
        if body:  # an empty chunk would end the response
            self._write(b"%x\r\n%b\r\n" % (len(body), body))


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have uvicorn send a body as it is, which the end of the connection ends: HTTP/1.0 knows no chunks, and no interim
    responses."""
    send = cycle.send
    cycle.chunked_encoding = cycle.waiting_for_100_continue = False

    async def send_bare(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_bare  # type: ignore[method-assign]
