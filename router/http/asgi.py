"""What happens to every request: its key, its turn, its record, and its end if the client disconnects.

Starlette notices a disconnect only while it streams, and from ASGI 2.4 on only at the next write. A queued request
writes nothing, so the edge listens for a disconnect once it has the request's body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.errors import CLIENT_LEFT, ApiError, api_error
from pdserve.router.http.exchange import FULL, MAX_HELD_BYTES, Exchange, Memory
from pdserve.router.http.keys import Caller, KeyFile
from pdserve.router.http.page import KEY_COOKIE, PAGE_PATHS
from pdserve.router.record import RecordSink


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of the ``async with``, which begins after the request's has been read, as soon as the client
    disconnects.

    Raises:
        ClientDisconnect: the body was cancelled.
    """
    try:
        # A timeout without a deadline is asyncio's cancel scope; a listener moves the deadline to now.
        async with asyncio.timeout(None) as scope:
            listener = asyncio.create_task(_expire_with(receive, scope))
            try:
                yield
            finally:
                listener.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientDisconnect from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _expire_with(receive: Receive, scope: asyncio.Timeout) -> None:
    await disconnected(receive)
    scope.reschedule(asyncio.get_running_loop().time())


_SLASHES = re.compile("/{2,}")

OPEN_PATHS = frozenset({"/live", *PAGE_PATHS})
"""Paths that never need a key: the page's files are the same for everybody, and ask for one."""


class EdgeMiddleware:
    """Makes the `Exchange` of each request, and returns its id as ``X-Request-Id``. Refuses requests without a key of
    ``keys`` before anything of them is read. Has requests that arrive together begin one in each turn of the event
    loop. Gives ``sinks`` the record of every POST at its end."""

    def __init__(self, app: ASGIApp, cluster: Cluster, keys: KeyFile | None, sinks: Sequence[RecordSink]) -> None:
        self._app = app
        self._cluster = cluster
        self._keys = keys
        self._sinks = sinks
        self._memory = Memory(MAX_HELD_BYTES)
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"  # of base URLs joined with paths
        state = scope.setdefault("state", {})
        # Whoever asks whether the router lives would restart one that is full
        is_beyond_limit = state.get("is_beyond_limit", False) and scope["path"] != "/live"
        exchange = Exchange(scope, receive, send, self._memory, self._cluster.max_model_len or 0)
        state["exchange"] = exchange
        status: int | None = None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = exchange.record.id
                if exchange.caller is not None:
                    headers.update(exchange.caller.rate_headers())
                route = "connections" if is_beyond_limit else getattr(scope.get("route"), "path", "other")
                self._cluster.metrics.responded(route, message["status"])
            await send(message)

        try:
            if is_beyond_limit:
                raise ApiError(503, "the router has as many connections as it takes; try again", headers=FULL)
            if self._keys is not None and scope["path"] not in OPEN_PATHS:
                await self._keys.refresh()
                exchange.caller = _caller(self._keys, exchange.headers)
                exchange.record.tenant = exchange.caller.key.tenant
            if scope["method"] == "POST":
                async with self._turn:
                    await asyncio.sleep(0)
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if status is not None:
                raise
            await api_error(error).response(scope["path"])(scope, receive, send_noted)
        finally:
            del state["exchange"]  # which has the scope
            self._ended(exchange, CLIENT_LEFT if status is None else status)

    def _ended(self, exchange: Exchange, status: int) -> None:
        exchange.release()
        record = exchange.record
        record.ended(status)
        if exchange.caller is not None:
            is_refused = status >= 400 and status != CLIENT_LEFT
            exchange.caller.close(record.num_completion_tokens, is_refused=is_refused)
        self._cluster.metrics.served(record)
        if exchange.method == "POST":
            for sink in self._sinks:
                sink.write(record)


def _caller(keys: KeyFile, headers: Headers) -> Caller:
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if not scheme:  # Anthropic's clients, or the page
        text = headers.get("x-api-key") or cookie_parser(headers.get("cookie", "")).get(KEY_COOKIE, "")
        scheme = "bearer"
    caller = keys.caller(text.strip()) if scheme.lower() == "bearer" else None
    if caller is None:
        message = (
            "this server needs a valid API key; send it in the header Authorization: Bearer KEY, or X-Api-Key: KEY"
        )
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return caller
