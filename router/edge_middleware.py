"""The outermost layer of the HTTP edge.

Here every request gets an id and an arrival time, a bound on its body, a count of its status, and, whatever happens
inside, an answer.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.router.errors import ApiError, api_error
from pdserve.router.observer import EdgeObserver

BODY_TIMEOUT_S = 60.0
"""From the headers of a request to the end of its body."""

_CLOSE = {"Connection": "close"}
"""What is left of the body is not read."""

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class EdgeMiddleware:
    """Sets ``request_id`` and ``arrived_s`` (`time.monotonic`) in the request's state; ``X-Request-Id`` comes back."""

    def __init__(self, app: ASGIApp, observer: EdgeObserver, max_body_bytes: int) -> None:
        self._app = app
        self._observer = observer
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {}).update(request_id=request_id, arrived_s=time.monotonic())
        is_answered = False

        async def send_noted(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                self._observer.responded(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        try:
            await self._app(scope, self._bounded(receive, headers), send_noted)
        except Exception as error:
            if is_answered:
                raise
            await api_error(error).response()(scope, receive, send_noted)

    def _bounded(self, receive: Receive, headers: Headers) -> Receive:
        """``receive`` that refuses a body which is too large, before reading it where it says its length, and one that
        does not arrive."""
        length = headers.get("content-length", "")
        num_bytes = 0
        is_too_large = length.isdecimal() and int(length) > self._max_body_bytes
        deadline_s: float | None = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def receive_bounded() -> Message:
            nonlocal num_bytes, is_too_large, deadline_s
            if is_too_large:
                raise self._too_large()
            if deadline_s is None:  # what comes after the body is awaited for as long as the answer takes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                refusal = f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
                raise ApiError(408, refusal, headers=_CLOSE) from None
            num_bytes += len(message.get("body", b""))
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


def _request_id(headers: Headers) -> str:
    """The client's own where it is printable and short."""
    wanted = headers.get("x-request-id", "")
    return wanted if _CLIENT_ID.fullmatch(wanted) else uuid.uuid4().hex
