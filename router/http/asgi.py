"""HTTP input of the edge: limits on size, time and memory, keys, and client disconnects.

Starlette notices a disconnect only while it streams, and from ASGI 2.4 on only at the next write. A queued request
writes nothing, so the edge listens for a disconnect once it has the request's body.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.router.http.errors import CLIENT_LEFT, ApiError, api_error
from pdserve.router.http.keys import Caller, KeyFile
from pdserve.router.http.page import KEY_COOKIE, PAGE_PATHS
from pdserve.router.http.request_log import RequestEntry, RequestLog
from pdserve.router.metrics import RouterMetrics

if TYPE_CHECKING:  # it needs an extra
    from pdserve.router.http.tracing import Tracer

Sign = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, *signs: Sign) -> AsyncIterator[None]:
    """Cancel the body of the ``async with`` as soon as the client disconnects.

    Args:
        receive: ``receive`` of the request, after its body has been read.
        signs: each returns when there is other reason to treat the client as gone.

    Raises:
        ClientDisconnect: the body was cancelled.
    """
    try:
        # A timeout without a deadline is asyncio's cancel scope; a listener moves the deadline to now.
        async with asyncio.timeout(None) as scope:
            all_signs: tuple[Sign, ...] = (partial(_disconnect, receive), *signs)
            listeners = [asyncio.create_task(_expire_after(sign, scope)) for sign in all_signs]
            try:
                yield
            finally:
                for listener in listeners:
                    listener.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientDisconnect from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _expire_after(sign: Sign, scope: asyncio.Timeout) -> None:
    await sign()
    scope.reschedule(asyncio.get_running_loop().time())


BODY_TIMEOUT_S = 60.0
"""Seconds from a request's headers to the end of its body."""
MAX_HELD_BYTES = 2**30
"""Limit for bodies and prompts of all requests together."""


class Memory:
    """Bounded number of bytes that requests hold."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """
        Raises:
            ApiError: it would be too much.
        """
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ApiError(429, "the router holds as many large requests as it can; try again", headers=_FULL)
        self.num_bytes += num_bytes


class Share:
    """Memory of one request."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """
        Raises:
            ApiError: requests hold too much already.
        """
        self._memory.take(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0


_CLOSE = {"Connection": "close"}
"""The rest of the body is not read."""
_FULL = {**_CLOSE, "Retry-After": "1"}

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Id that a client may choose for its request."""
_SLASHES = re.compile("/{2,}")

OPEN_PATHS = frozenset({"/live", *PAGE_PATHS})
"""Paths that never need a key: the page's files are the same for everybody, and ask for one."""


class EdgeMiddleware:
    """Sets in the request's state ``request_id``, ``arrived_s`` (`time.monotonic`), ``entry`` of the log, ``memory``
    (its `Share`), ``caller`` (None without keys) and ``send`` (of this middleware, for the parts of a stream: those
    further in only look at the start of a response); returns ``X-Request-Id``. Refuses requests without a key of
    ``keys`` before anything of them is read. Has requests that arrive together begin one in each turn of
    the event loop. Logs every POST at its end."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: RouterMetrics,
        max_body_bytes: int,
        keys: KeyFile | None,
        request_log: RequestLog | None,
        tracer: Tracer | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._request_log = request_log
        self._memory = Memory(MAX_HELD_BYTES)
        self._turn = asyncio.Lock()
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"  # of base URLs joined with paths
        wanted_id = sent.get("x-request-id", "")
        request_id = wanted_id if _CLIENT_ID.fullmatch(wanted_id) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        # Whoever asks whether the router lives would restart one that is full
        is_beyond_limit = state.get("is_beyond_limit", False) and scope["path"] != "/live"
        arrived_s = time.monotonic()
        entry = RequestEntry(request_id, scope["path"], arrived_s)
        memory = Share(self._memory)
        state.update(request_id=request_id, arrived_s=arrived_s, entry=entry, memory=memory, caller=None, send=send)
        status: int | None = None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if state["caller"] is not None:
                    headers.update(state["caller"].rate_headers())
                route = "connections" if is_beyond_limit else getattr(scope.get("route"), "path", "other")
                self._metrics.responded(route, message["status"])
            await send(message)

        try:
            if is_beyond_limit:
                raise ApiError(503, "the router has as many connections as it takes; try again", headers=_FULL)
            if self._keys is not None and scope["path"] not in OPEN_PATHS:
                await self._keys.refresh()
                state["caller"] = _caller(self._keys, sent)
            if scope["method"] == "POST":
                async with self._turn:
                    await asyncio.sleep(0)
            await self._app(scope, self._bounded(receive, sent, memory), send_noted)
        except Exception as error:
            if status is not None:
                raise
            await api_error(error).response()(scope, receive, send_noted)
        finally:
            memory.release()
            final = CLIENT_LEFT if status is None else status
            if state["caller"] is not None:
                entry.tenant = state["caller"].key.tenant
                state["caller"].close(is_refused=final >= 400 and final != CLIENT_LEFT)
            is_good = entry.is_good(final)
            if is_good is not None:
                self._metrics.tenant_served(entry.tenant, is_good=is_good)
            if scope["method"] == "POST":
                if self._request_log is not None:
                    self._request_log.write(entry, final)
                if self._tracer is not None:
                    self._tracer.record(entry, final, sent.get("traceparent", ""))

    def _bounded(self, receive: Receive, headers: Headers, memory: Share) -> Receive:
        """``receive`` that refuses a body which is too large or does not arrive; a declared length is checked before
        reading."""
        length = headers.get("content-length", "")
        num_bytes = 0
        is_too_large = length.isdecimal() and int(length) > self._max_body_bytes
        deadline_s: float | None = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def receive_bounded() -> Message:
            nonlocal num_bytes, is_too_large, deadline_s
            if is_too_large:
                raise self._too_large()
            if deadline_s is None:  # messages after the body are awaited for as long as the answer takes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                refusal = f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
                raise ApiError(408, refusal, headers=_CLOSE) from None
            num_bytes += len(message.get("body", b""))
            memory.take(len(message.get("body", b"")))
            is_too_large = num_bytes > self._max_body_bytes
            if is_too_large:
                raise self._too_large()
            if not message.get("more_body", False):
                deadline_s = None
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        message = f"the request body is larger than {self._max_body_bytes} bytes; shorten the prompt"
        return ApiError(413, message, headers=_CLOSE)


def _caller(keys: KeyFile, headers: Headers) -> Caller:
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if not scheme:
        scheme, text = "bearer", cookie_parser(headers.get("cookie", "")).get(KEY_COOKIE, "")
    caller = keys.caller(text.strip()) if scheme.lower() == "bearer" else None
    if caller is None:
        message = "this server needs a valid API key; send it in the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return caller
