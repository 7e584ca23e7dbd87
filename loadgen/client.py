"""Streams completions over HTTP/1.1 and records when each token arrives: the load generator's connections.

Does as little work per token as Python allows, so that the client is not what is measured. Speaks the protocol of
OpenAI-compatible servers: ``POST /v1/completions`` with ``stream``, answered by server-sent events. Does not decide
when to send.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from pdserve.loadgen.server_tls import server_tls

PATH = "/v1/completions"
SPARE_CONNECTIONS = 4
"""Connections kept open ahead of the next requests, so that none waits for one."""

_MAX_ERROR_BYTES = 2**12


@dataclass(slots=True, eq=False)
class StreamedAnswer:
    """An answer, on the clock of `time.monotonic`."""

    sent_s: float = 0.0
    """The request was handed to the socket."""
    ended_s: float = 0.0
    """The answer was complete, or failed."""
    token_s: list[float] = field(default_factory=list)
    """Time of each event with a part of the answer."""
    token_ids: list[int] = field(default_factory=list)
    """Only where the request asked for them."""
    num_tokens: int = 0
    """As counted by the server; 0 if it does not say."""
    num_cached_tokens: int = 0
    status: int = 0
    """HTTP status; 0 without an answer."""
    retry_after_s: float = 0.0
    """``Retry-After`` of a refusal."""
    error: str = ""
    """Why the answer is not complete."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamClient:
    """Keep-alive connections to one server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """``url``: of the server, without ``/v1``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; write it like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._tls = server_tls(url)
        self._port = parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1") + PATH
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, num_connections: int = SPARE_CONNECTIONS) -> None:
        """Connect ahead.

        Raises:
            OSError: nobody listens.
        """
        for connection in await asyncio.gather(*(self._connect() for _ in range(num_connections))):
            self._idle.append(connection)

    async def complete(self, body: bytes, answer: StreamedAnswer, timeout_s: float) -> None:
        """Send one request, now, and fill in ``answer`` until it ends; what fails is in it, too."""
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
        except OSError as error:
            answer.error = f"cannot connect: {error.strerror or error}"
            return
        self._keep_spare()
        done = connection.send(self._head + b"%d\r\n\r\n" % len(body) + body, answer)
        try:
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            answer.error = f"not complete after {timeout_s:g} s"
            connection.abort()

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._all:
            connection.abort()

    def give_back(self, connection: _Connection) -> None:
        """Make it available for another request."""
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _keep_spare(self) -> None:
        if len(self._idle) + len(self._opening) < SPARE_CONNECTIONS:
            task = asyncio.create_task(self._open_spare())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open_spare(self) -> None:
        try:
            self._idle.append(await self._connect())
        except OSError:
            return  # the request that needs the connection will say so

    async def _connect(self) -> _Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), self._host, self._port, ssl=self._tls
        )
        self._all.add(protocol)
        return protocol


class _Connection(asyncio.Protocol):
    """One request at a time. Methods called ``on_...`` are those that `httptools` calls."""

    def __init__(self, client: StreamClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer: StreamedAnswer | None = None
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._rest = b""
        """The beginning of a line that is not complete."""
        self._is_done_said = False

    def send(self, request: bytes, answer: StreamedAnswer) -> asyncio.Future[None]:
        """Write a request; the future is done when ``answer`` is as complete as it will be."""
        assert self._answer is None
        assert self._transport is not None
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._is_done_said = b"", False
        self._done = asyncio.get_running_loop().create_future()
        answer.sent_s = time.monotonic()
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self)
        self._end("the server closed the connection")

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        if self._answer is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"the answer is broken: {error}")
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and self._answer is not None:
            self._answer.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        assert answer is not None
        if answer.status != 200:
            answer.error = (answer.error + body.decode(errors="replace"))[:_MAX_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(answer, line[5:].strip())

    def on_message_complete(self) -> None:
        assert self._answer is not None
        is_reusable = self._parser.should_keep_alive()
        is_whole = self._is_done_said or self._answer.status != 200
        self._end("" if is_whole else "the stream ended early")
        if is_reusable:
            self._client.give_back(self)
        else:
            self.abort()

    def _event(self, answer: StreamedAnswer, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done_said = True
            return
        chunk = _decode(data)
        if chunk.error is not None:
            answer.error = data.decode(errors="replace")[:_MAX_ERROR_BYTES]
        if chunk.choices:
            answer.token_s.append(self._now_s)
            answer.token_ids += chunk.choices[0].token_ids or ()
        if chunk.usage is not None:
            answer.num_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0

    def _end(self, error: str) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        answer.ended_s = time.monotonic()
        answer.error = answer.error or error
        if answer.status != 200:
            answer.error = answer.error or "no reason given"
        assert self._done is not None
        if not self._done.done():
            self._done.set_result(None)
