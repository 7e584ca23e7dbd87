"""Errors in the format of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``.

Handlers raise `ApiError` for a client's mistake and pass on `GenerationError` of the cluster; FastAPI's own errors are
rewritten here. Details of an unexpected exception are logged and never reach a client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pdserve.router.requests.request import GenerationError

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""Status, only in metrics, of a request whose client left before another status was sent."""

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 64
"""Limit for a name chosen by a client, such as a key of ``logit_bias``."""

_TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {429: "rate_limit_exceeded"}


class ApiError(HTTPException):
    """A request that cannot be served as it is. ``param`` names the field to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, _shortened(message), headers)
        self.param = param
        self.code = code or _CODES.get(status)

    def body(self) -> bytes:
        error = {
            "message": self.detail,
            "type": _TYPES.get(self.status_code, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


def _shortened(message: str) -> str:
    """Truncate a message, which may quote any amount of the client's text."""
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."


def api_error(error: Exception) -> ApiError:
    """Convert an exception to an error for the client; log an unexpected one and return 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationError):
        return ApiError(error.status, error.message, headers=_retry_after(error))
    logger.error("unexpected error in the HTTP edge", exc_info=error)
    return ApiError(500, "internal error of the router; its log has the cause")


def _retry_after(error: GenerationError) -> dict[str, str]:
    """``Retry-After`` header for clients of an overloaded cluster, in whole seconds."""
    if error.retry_after_s is None and error.status != 429:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or 0)))}


def install_error_handlers(app: FastAPI) -> None:
    """Write FastAPI's errors and `ApiError` as OpenAI error objects; `EdgeMiddleware` handles all other exceptions."""

    app.exception_handler(ApiError)(_told)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_validation_error)
    app.exception_handler(ClientDisconnect)(_client_left)


async def _told(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """FastAPI's own errors: unknown route, wrong method, unreadable body."""
    message = error.detail
    if error.status_code == 404:
        message = f"there is no route {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    return _first_of(error.errors()).response()


def _first_of(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    first = errors[0]
    where = [str(part)[:MAX_NAME_CHARS] for part in first["loc"] if part != "body"]
    if not where:
        return ApiError(400, "the request body must be a JSON object")
    param = ".".join(where)
    return ApiError(400, f"{param}: {first['msg']}", param=param)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
